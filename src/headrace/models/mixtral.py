"""Mixtral (Jiang et al. 2024): Mistral's structure with a mixture of experts in every layer."""

from __future__ import annotations

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.experts import Routing, expert_act, expert_rules, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import rope_settings

__all__ = ["MixtralModel"]

THETA = 1_000_000.0
EPS = 1e-5
DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {
    **PRE_NORM_RULES,
    **expert_rules("model.layers.*.block_sparse_moe", "layers.*.mlp", names=("w1", "w3", "w2")),
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
}
"""The published names, and those that transformers has in memory."""


class MixtralModel(CausalLm):
    """Pre-norm decoder; every token goes to two of eight experts."""

    model_types = ("mixtral",)
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=RULES,
            eps=EPS,
            ropes={"all": factory.rotary(rope_settings(config, default_theta=THETA), config.head_dim())},
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", EPS)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=config.optional_integer("sliding_window"),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=factory.experts(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            routing=Routing(
                num_experts=num_experts(config, 8),
                top_k=config.integer("num_experts_per_tok"),
                normalise=True,
            ),
            act=expert_act(config.text("hidden_act", "silu")),
        ),
    )
