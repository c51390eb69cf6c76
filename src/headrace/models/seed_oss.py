"""Seed-OSS (ByteDance 2025): Llama's structure with biases on q, k and v, and on the output if its config says so."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig

__all__ = ["SeedOssModel"]

DEFAULTS = {"max_position_embeddings": 524_288, "num_key_value_heads": 8, "head_dim": 128}
"""What transformers takes for keys that a config leaves out."""


class SeedOssModel(CausalLm):
    model_types = ("seed_oss",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(config, factory, layer=lambda name, _: _layer(config, factory, name), rules=PRE_NORM_RULES)


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            qkv_bias=config.flag("attention_bias", True),
            out_bias=config.flag("attention_out_bias", False),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
