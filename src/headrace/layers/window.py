"""Which layers attend over a sliding window, as configs state it."""

from __future__ import annotations

from headrace.layers.hf_config import HfConfig

FULL = "full_attention"
SLIDING = "sliding_attention"


def layer_kinds(config: HfConfig, *, sliding_pattern: int | None = None) -> list[str]:
    """`full_attention` or `sliding_attention` by layer.

    From `layer_types`; else every `sliding_pattern`-th layer is full (Gemma); else those from `max_window_layers` on
    slide when `use_sliding_window` is set (Qwen).

    Raises:
        ValueError: `layer_types` of another length than the model has layers, or with a kind that is not known.
    """
    num_layers = config.integer("num_hidden_layers")
    stated = config.get("layer_types")
    if stated is not None:
        if not isinstance(stated, list):
            raise ValueError(f"{config.place}: layer_types must be a list, not {stated!r}")
        unknown = sorted({str(kind) for kind in stated} - {FULL, SLIDING})
        if unknown or len(stated) != num_layers:
            wrong = f"the unknown {unknown[0]!r}" if unknown else f"{len(stated)} entries for {num_layers} layers"
            raise ValueError(f"{config.place}: layer_types has {wrong}: it states {FULL} or {SLIDING} by layer")
        return list(stated)
    if sliding_pattern is not None:
        return [SLIDING if (layer + 1) % sliding_pattern else FULL for layer in range(num_layers)]
    if config.flag("use_sliding_window", False) and "sliding_window" in config:
        first = config.integer("max_window_layers", least=0)
        return [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return [FULL] * num_layers


def layer_windows(config: HfConfig) -> list[int | None]:
    """Tokens that a query sees, itself included, by layer; None is everything. For configs in Qwen's form."""
    if not config.flag("use_sliding_window", False):
        return [None] * config.integer("num_hidden_layers")
    window = config.optional_integer("sliding_window")
    return [window if kind == SLIDING else None for kind in layer_kinds(config)]
