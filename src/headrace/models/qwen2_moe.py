"""Qwen2 with a mixture of experts (Yang et al. 2024): biases on q, k and v, and a shared expert behind a gate."""

from __future__ import annotations

from headrace.layers.causal import CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.experts import expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import FULL, SLIDING, layer_kinds
from headrace.models._qwen_moe import qwen_mlp

__all__ = ["Qwen2MoeModel"]

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
"""What transformers takes for keys that a config leaves out."""

RULES = {**PRE_NORM_RULES, **expert_rules("model.layers.*.mlp", "layers.*.mlp", shared="shared_expert")}


class Qwen2MoeModel(CausalLm):
    """Pre-norm decoder; some layers may have a dense MLP, some may use a sliding window."""

    model_types = ("qwen2_moe",)
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        windows = _windows(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index, windows[index]),
            rules=RULES,
        )


def _windows(config: HfConfig) -> list[int | None]:
    """Where layers aren't listed, every other one of the first `max_window_layers` slides: unlike in dense Qwen2."""
    slides = config.flag("use_sliding_window", False)
    if "layer_types" in config:
        kinds = layer_kinds(config)
        if SLIDING in kinds and not slides:  # transformers lets such layers see nothing
            raise ValueError(
                f"{config.place}: layer_types lists {SLIDING}, and use_sliding_window is not set: set it, or list"
                f" {FULL} alone"
            )
    else:
        last = config.integer("max_window_layers", least=0)
        layers = range(config.integer("num_hidden_layers"))
        kinds = [SLIDING if slides and (index + 1) % 2 and index < last else FULL for index in layers]
    return [config.optional_integer("sliding_window") if kind == SLIDING else None for kind in kinds]


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int, window: int | None) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all",
            window=window,
            qkv_bias=config.flag("qkv_bias", True),
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=qwen_mlp(config, factory, f"{name}.mlp", index, count=60, has_shared=True),
    )
