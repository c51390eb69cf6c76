"""OLMo 3 (Ai2 2025): OLMo 2 with sliding-window layers between full ones, of which the full ones alone scale rope."""

from __future__ import annotations

from headrace.layers.blocks import PostNormLayer
from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import POST_NORM_RULES, QK_NORM_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import RopeSettings, max_position, rope_settings
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["Olmo3Model"]

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096}
"""What transformers takes for keys that a config leaves out."""

THETA = 500_000.0


class Olmo3Model(CausalLm):
    model_types = ("olmo3",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        kinds = layer_kinds(config, sliding_pattern=4)
        dim = config.head_dim()
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kind=kinds[index]),
            rules={**POST_NORM_RULES, **QK_NORM_RULES},
            ropes={kind: factory.rotary(_rope_settings(config, kind), dim) for kind in sorted(set(kinds))},
            positions=max_position(config, layer_type=FULL),
        )


def _rope_settings(config: HfConfig, kind: str) -> RopeSettings:
    """`rope_parameters` by layer type; older configs scale the full layers only."""
    if kind == SLIDING and "rope_parameters" not in config:
        config = HfConfig({**config, "rope_scaling": None}, place=config.place)
    return rope_settings(config, layer_type=kind, default_theta=THETA)


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, kind: str) -> PostNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    heads, has_bias = config.heads(), config.flag("attention_bias", False)
    sizes = {key: heads[key] for key in ("num_heads", "num_kv_heads", "head_dim")}
    return PostNormLayer(
        attention=factory.attention(
            f"{name}.attention",
            **heads,
            rope=kind,
            window=config.integer("sliding_window") if kind == SLIDING else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
            steps=[factory.whole_norms(f"{name}.attention", **sizes, eps=eps)],
        ),
        attention_post_norm=factory.norm(f"{name}.attention_post_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
        mlp_post_norm=factory.norm(f"{name}.mlp_post_norm", hidden_size, eps=eps),
    )
