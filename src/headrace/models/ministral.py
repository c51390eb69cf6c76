"""Ministral 8B (Mistral AI 2024): Mistral whose layers may each slide or not."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["MinistralModel"]

DEFAULTS = {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8}
"""What transformers takes for keys that a config leaves out."""


class MinistralModel(CausalLm):
    model_types = ("ministral",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        kinds = [SLIDING if "sliding_window" in config else FULL] * config.integer("num_hidden_layers")
        if "layer_types" in config:
            kinds = layer_kinds(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kind=kinds[index]),
            rules=PRE_NORM_RULES,
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, kind: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    window = config.integer("sliding_window") if kind == SLIDING else None
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(f"{name}.attention", **config.heads(), rope="all", window=window),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
