"""GLM-4 0414, dense (Zhipu AI 2025): norms around each block; rope turns neighbouring features of half a head."""

from __future__ import annotations

from headrace.layers.blocks import SandwichLayer
from headrace.layers.causal import CausalLm, fused_mlp_names, gated_mlp
from headrace.layers.decoder import COMMON_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.norm import Norm

__all__ = ["Glm4Model"]

DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {
    **COMMON_RULES,
    "model.layers.*.input_layernorm.weight": "layers.*.input_norm.weight",
    "model.layers.*.post_self_attn_layernorm.weight": "layers.*.attention_post_norm.weight",
    "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm.weight",
    "model.layers.*.post_mlp_layernorm.weight": "layers.*.mlp_post_norm.weight",
}


class Glm4Model(CausalLm):
    model_types = ("glm4",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=RULES,
            fused=fused_mlp_names(config.integer("intermediate_size")),
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> SandwichLayer:
    def norm(part: str) -> Norm:
        return factory.norm(f"{name}.{part}", config.integer("hidden_size"), eps=config.number("rms_norm_eps"))

    return SandwichLayer(
        input_norm=norm("input_norm"),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            interleaved=True,
            qkv_bias=config.flag("attention_bias", True),
        ),
        attention_post_norm=norm("attention_post_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=gated_mlp(config, factory, name),
        mlp_post_norm=norm("mlp_post_norm"),
    )
