"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's structure with biases on q, k and v."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import layer_windows

__all__ = ["Qwen2Model"]

DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
"""What transformers takes for keys that a config leaves out."""


class Qwen2Model(CausalLm):
    """Pre-norm decoder; its later layers may use a sliding window."""

    model_types = ("qwen2",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        windows = layer_windows(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, window=windows[index]),
            rules=PRE_NORM_RULES,
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, window: int | None) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=window,
            qkv_bias=True,
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
