"""Qwen3, dense (Qwen team 2025): Llama's structure with norms on queries and keys."""

from __future__ import annotations

from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import PRE_NORM_RULES, QK_NORM_RULES, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import layer_windows

__all__ = ["Qwen3Model"]

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "head_dim": 128,
    "num_key_value_heads": 32,
}
"""What transformers takes for keys that a config leaves out."""


class Qwen3Model(CausalLm):
    """Pre-norm decoder; its later layers may use a sliding window."""

    model_types = ("qwen3",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        windows = layer_windows(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, window=windows[index]),
            rules={**PRE_NORM_RULES, **QK_NORM_RULES},
        )


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, window: int | None) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    head_dim = config.head_dim()
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
            q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
    )
