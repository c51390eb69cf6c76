"""Llama 2 to 3.x, Mistral and what shares their structure (Touvron et al. 2023; Jiang et al. 2023)."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import SLIDING, layer_kinds

__all__ = ["LlamaModel"]


DEFAULTS = {"max_position_embeddings": 2048}
MISTRAL_DEFAULTS = {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8}
"""What transformers takes for keys that a config leaves out."""


class LlamaModel(CausalLm):
    """Pre-norm decoder with grouped-query attention and a gated MLP."""

    model_types = ("llama", "mistral")
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(MISTRAL_DEFAULTS if config.model_type == "mistral" else DEFAULTS)
        windows = _windows(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, windows[index]),
            rules=PRE_NORM_RULES,
        )


def _windows(config: HfConfig) -> list[int | None]:
    """A Mistral's `sliding_window` holds for the layers that `layer_types` lists so, or for all."""
    num_layers = config.integer("num_hidden_layers")
    if config.model_type != "mistral":
        return [None] * num_layers
    if "layer_types" not in config:
        return [config.optional_integer("sliding_window")] * num_layers
    return [config.integer("sliding_window") if kind == SLIDING else None for kind in layer_kinds(config)]


def _layer(config: HfConfig, factory: LayerFactory, name: str, window: int | None) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    has_bias = config.flag("attention_bias", False)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=window,
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
