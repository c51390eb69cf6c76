"""The scales that keys and values of an FP8 cache are divided by, and a word about layers that have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.attention.port import AttentionSpec
from headrace.layers.port import Layer, RecurrentLayer
from headrace.log import get

__all__ = ["kv_scales_of"]

log = get("engine")


def kv_scales_of(layers: Sequence[Layer | RecurrentLayer], dtype: torch.dtype) -> tuple[tuple[int, float, float], ...]:
    """(layer, of keys, of values): of layers that keep heads in FP8. Warns of those whose scales are 1.

    dtype: of the KV cache.
    """
    if dtype != torch.float8_e4m3fn:
        return ()
    found: list[tuple[int, float, float]] = []
    for index, layer in enumerate(layers):
        spec = None if isinstance(layer, RecurrentLayer) else layer.spec
        if isinstance(spec, AttentionSpec) and spec.source is None:
            found.append((index, spec.k_scale, spec.v_scale))
    if plain := [index for index, *scales in found if scales == [1.0, 1.0]]:
        log.warning(
            "kv_cache_config.dtype: the FP8 cache of layers %s has the scale 1.0, since the checkpoint gives none:"
            " answers may get worse; use a checkpoint with k_scale and v_scale, or an unquantised cache",
            spans(plain),
        )
    return tuple(found)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
