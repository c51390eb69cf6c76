"""Hunyuan dense (Tencent 2025): Llama with norms on queries and keys after rope, whose base a constant stretches."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import TurnedNorms
from headrace.layers.hf_config import HfConfig

__all__ = ["HunyuanDenseModel"]

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
"""What transformers takes for keys that a config leaves out."""

RULES = {
    **PRE_NORM_RULES,
    "model.layers.*.self_attn.query_layernorm.weight": "layers.*.attention.q_norm.weight",
    "model.layers.*.self_attn.key_layernorm.weight": "layers.*.attention.k_norm.weight",
}


class HunyuanDenseModel(CausalLm):
    model_types = ("hunyuan_v1_dense",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(config, factory, layer=lambda name, _: _layer(config, factory, name), rules=RULES)


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    hidden_size, eps, head_dim = config.integer("hidden_size"), config.number("rms_norm_eps"), config.head_dim()
    has_bias = config.flag("attention_bias", False)
    norms = TurnedNorms(
        factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps),
        factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps),
    )
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention", **config.heads(), rope="all", qkv_bias=has_bias, out_bias=has_bias, steps=[norms]
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
