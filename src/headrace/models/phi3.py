"""Phi 3 and 4 (Microsoft 2024): Llama's structure, q, k, v and gate, up in one checkpoint tensor each, LongRoPE."""

from __future__ import annotations

from typing import Any

from headrace.layers.causal import CausalLm, fused_names, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import max_position, rope_settings

__all__ = ["Phi3Model"]

DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
"""What transformers takes for keys that a config leaves out."""


class Phi3Model(CausalLm):
    model_types = ("phi3",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        with_rope = HfConfig({**config, **_rope_keys(config)}, place=config.place)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=PRE_NORM_RULES,
            ropes={"all": factory.rotary(rope_settings(with_rope), config.head_dim())},
            positions=max_position(with_rope),
            fused=fused_names(config),
        )


def _rope_keys(config: HfConfig) -> dict[str, Any]:
    """The first Phi 3 called its LongRoPE `su` or `yarn`."""
    for key in ("rope_scaling", "rope_parameters"):
        if key in config:
            stated = config.section(key)
            kind = stated.get("rope_type", stated.get("type", "default"))
            return {key: {**stated, "rope_type": "longrope" if kind in ("su", "yarn") else kind}}
    return {}


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    window = config.optional_integer("sliding_window")
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(f"{name}.attention", **config.heads(), rope="all", window=window),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
