"""MiniMax-M2 (MiniMax 2025): sigmoid routing with corrected scores, norms over all queries and all keys of a token."""

from __future__ import annotations

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, QK_NORM_RULES, PreNormLayer
from headrace.layers.experts import Routing, expert_act, expert_rules, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import rope_settings

__all__ = ["MiniMaxM2Model"]

DEFAULTS = {
    "max_position_embeddings": 196_608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "intermediate_size": 1536,
}
"""What transformers takes for keys that a config leaves out."""

THETA = 5_000_000.0

RULES = {
    **PRE_NORM_RULES,
    **QK_NORM_RULES,
    **expert_rules("model.layers.*.block_sparse_moe", "layers.*.mlp", names=("w1", "w3", "w2")),
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
}
"""The published names, and those that transformers has in memory."""


class MiniMaxM2Model(CausalLm):
    """Pre-norm decoder with experts in every layer; rope turns a part of a head's features."""

    model_types = ("minimax_m2",)
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        config.only({"scoring_func": "sigmoid"})
        if "rotary_dim" in config:
            config = config.with_defaults({"partial_rotary_factor": config.integer("rotary_dim") / config.head_dim()})
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=RULES,
            ropes={"all": factory.rotary(rope_settings(config, default_theta=THETA), config.head_dim())},
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    heads, kv_heads, head_dim = config.integer("num_attention_heads"), config.num_kv_heads(), config.head_dim()
    norms = factory.whole_norms(f"{name}.attention", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, eps=eps)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope="all",
            steps=[norms],
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=factory.experts(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            routing=Routing(
                num_experts=num_experts(config, 256),
                top_k=config.integer("num_experts_per_tok"),
                scoring="sigmoid",
                normalise=True,
            ),
            act=expert_act(config.text("hidden_act", "silu")),
            has_correction=True,
        ),
    )
