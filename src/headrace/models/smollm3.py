"""SmolLM3 (Hugging Face 2025): Llama, with no rope in every fourth layer."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import rope_settings
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["SmolLM3Model"]

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}
"""What transformers takes for keys that a config leaves out."""

THETA = 2_000_000.0


class SmolLM3Model(CausalLm):
    model_types = ("smollm3",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        has_rope = _has_rope(config)
        slides = config.flag("use_sliding_window", False) and "sliding_window" in config
        kinds = [SLIDING if slides and not turned else FULL for turned in has_rope]
        if "layer_types" in config:
            kinds = layer_kinds(config)
        rope = rope_settings(config, default_theta=THETA)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(
                config,
                factory,
                name,
                rope="all" if has_rope[index] else None,
                window=config.integer("sliding_window") if kinds[index] == SLIDING else None,
            ),
            rules=PRE_NORM_RULES,
            ropes={"all": factory.rotary(rope, config.head_dim())},
        )


def _has_rope(config: HfConfig) -> list[bool]:
    """By layer. The key's name says the opposite of what it means: 1 is a layer with rope."""
    num_layers = config.integer("num_hidden_layers")
    stated = config.marks("no_rope_layers")
    if stated is None:
        interval = config.integer("no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(stated) != num_layers:
        raise ValueError(
            f"{config.place}: no_rope_layers must be a list of {num_layers} zeros and ones, not {stated!r}"
        )
    return stated


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, rope: str | None, window: int | None) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    has_bias = config.flag("attention_bias", False)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention", **config.heads(), rope=rope, window=window, qkv_bias=has_bias, out_bias=has_bias
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
