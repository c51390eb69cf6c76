"""EXAONE 4 (LG AI Research 2025): norms after blocks and on heads; beside sliding layers, full ones have no rope."""

from __future__ import annotations

from headrace.layers.blocks import PostNormLayer
from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import POST_NORM_RULES, QK_NORM_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["Exaone4Model"]

DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
"""What transformers takes for keys that a config leaves out."""


class Exaone4Model(CausalLm):
    model_types = ("exaone4",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        kinds = _kinds(config)
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, kind=kinds[index]),
            rules={**POST_NORM_RULES, **QK_NORM_RULES},
        )


def _kinds(config: HfConfig) -> list[str]:
    """The pattern of published configs is a word, such as LLLG: three local layers, one global."""
    pattern = config.get("sliding_window_pattern")
    if "layer_types" in config or "sliding_window" not in config or not isinstance(pattern, str):
        every = (
            config.integer("sliding_window_pattern")
            if "sliding_window" in config and not isinstance(pattern, str)
            else 1
        )
        return layer_kinds(config, sliding_pattern=every)
    if not pattern or set(pattern) - {"L", "G"}:
        raise ValueError(f"{config.place}: sliding_window_pattern must be of the letters L and G, not {pattern!r}")
    num_layers = config.integer("num_hidden_layers")
    return [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(num_layers)]


def _layer(config: HfConfig, factory: LayerFactory, name: str, *, kind: str) -> PostNormLayer:
    hidden_size, eps, head_dim = config.integer("hidden_size"), config.number("rms_norm_eps"), config.head_dim()
    is_sliding = kind == SLIDING
    return PostNormLayer(
        attention=factory.attention(
            f"{name}.attention",
            **config.heads(),
            rope="all" if is_sliding or "sliding_window" not in config else None,
            window=config.integer("sliding_window") if is_sliding else None,
            q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps),
        ),
        attention_post_norm=factory.norm(f"{name}.attention_post_norm", hidden_size, eps=eps),
        mlp=gated_mlp(config, factory, name),
        mlp_post_norm=factory.norm(f"{name}.mlp_post_norm", hidden_size, eps=eps),
    )
