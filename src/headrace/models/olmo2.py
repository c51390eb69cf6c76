"""OLMo 2 (Ai2 2024): norms after each block instead of before, and over all heads of queries and of keys."""

from __future__ import annotations

from headrace.layers.blocks import PostNormLayer
from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import POST_NORM_RULES, QK_NORM_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig

__all__ = ["Olmo2Model"]

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
"""What transformers takes for keys that a config leaves out."""


class Olmo2Model(CausalLm):
    model_types = ("olmo2",)

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules={**POST_NORM_RULES, **QK_NORM_RULES},
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PostNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    heads, has_bias = config.heads(), config.flag("attention_bias", False)
    sizes = {key: heads[key] for key in ("num_heads", "num_kv_heads", "head_dim")}
    return PostNormLayer(
        attention=factory.attention(
            f"{name}.attention",
            **heads,
            rope="all",
            qkv_bias=has_bias,
            out_bias=has_bias,
            steps=[factory.whole_norms(f"{name}.attention", **sizes, eps=eps)],
        ),
        attention_post_norm=factory.norm(f"{name}.attention_post_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
        mlp_post_norm=factory.norm(f"{name}.mlp_post_norm", hidden_size, eps=eps),
    )
