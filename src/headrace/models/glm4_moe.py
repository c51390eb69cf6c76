"""GLM-4.5 to 4.7 (GLM team 2025): corrected sigmoid routing with groups, shared experts, dense first layers."""

from __future__ import annotations

import torch

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, QK_NORM_RULES, PreNormLayer
from headrace.layers.experts import Experts, corrected_routing, expert_act, expert_rules, num_experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.norm import HeadNorm

__all__ = ["Glm4MoeModel"]

EPS = 1e-5
DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {
    **PRE_NORM_RULES,
    **expert_rules("model.layers.*.mlp", "layers.*.mlp"),
    **QK_NORM_RULES,
}


class Glm4MoeModel(CausalLm):
    """Pre-norm decoder; rope turns half of a head's features."""

    model_types = ("glm4_moe",)
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        num_layers = config.integer("num_hidden_layers")
        drafting = config.integer("num_nextn_predict_layers", config.integer("num_mtp_layers", 1, least=0), least=0)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index),
            rules=RULES,
            eps=EPS,
            kept=[f"model.layers.{num_layers + index}.**" for index in range(drafting)],
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", EPS)
    head_dim, has_norm = config.head_dim(), config.flag("use_qk_norm", False)

    def head_norm(part: str) -> HeadNorm | None:
        return factory.head_norm(f"{name}.attention.{part}", head_dim, eps=eps) if has_norm else None

    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            qkv_bias=config.flag("attention_bias", False),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=_mlp(config, factory, f"{name}.mlp", index),
    )


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), config.text("hidden_act", "silu")
    if index < config.integer("first_k_dense_replace", least=0):
        return factory.mlp(
            name, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size"), act=act
        )
    inner = config.integer("moe_intermediate_size")
    num_shared = config.integer("n_shared_experts", least=0)
    return factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=inner,
        routing=corrected_routing(config, num_experts(config, 128)),
        act=expert_act(act),
        router_dtype=torch.float32,
        has_correction=True,
        shared_size=num_shared * inner if num_shared else None,
        shared_act=act,
    )
