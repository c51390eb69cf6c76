"""Layer groups: layers whose KV has the same shape, dtype and window share block tables and a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from headrace.attention._latent import LatentSpec
from headrace.attention._sparse import SparseSpec
from headrace.attention.port import AttentionSpec, CacheSpec
from headrace.config.kv import KvCacheConfig, window_of
from headrace.layers.port import Layer, RecurrentLayer
from headrace.seam import GroupSpec, Region

Spec = TypeVar("Spec", bound=CacheSpec)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back layers see, as configured."""

    windows: tuple[int, ...] = ()
    """By layer, repeated; () leaves each layer its own."""
    longest: int = 0
    """Of a sequence: a window that holds all of it is none."""
    sink_tokens: int = 0
    """First tokens that layers with a window see beside it."""

    def of(self, layer: int, spec: Spec) -> Spec:
        """A layer's attention under these limits."""
        window = window_of(layer, spec.window, windows=self.windows, longest=self.longest)
        if window is None or (window, self.sink_tokens) == (spec.window, 0):
            return spec
        if isinstance(spec, AttentionSpec) and spec.is_chunked and window != spec.window:
            raise ValueError(
                f"kv_cache_config.max_attention_window: layer {layer} attends within chunks of {spec.window} tokens,"
                " which can't be narrowed: give it that or more"
            )
        if isinstance(spec, SparseSpec) or (isinstance(spec, LatentSpec) and spec.index is not None):
            raise ValueError(
                f"kv_cache_config.max_attention_window: layer {layer} chooses among all tokens before it: leave it out,"
                " or give the layer 0 or the longest sequence"
            )
        limited: Any = replace(spec, window=window, sink_tokens=self.sink_tokens)  # pyright: ignore[reportArgumentType]
        return limited


WHOLE = Reach()


def configured_reach(kv: KvCacheConfig, *, longest: int) -> Reach:
    """longest: tokens of the longest sequence, as configured or the model's."""
    return Reach(tuple(kv.max_attention_window or ()), longest, kv.sink_token_length or 0)


def group_layers(
    layers: Sequence[Layer | RecurrentLayer], dtype: torch.dtype, *, reach: Reach = WHOLE
) -> tuple[GroupSpec, ...]:
    """Groups in the order of their first layer; heads and bytes are this rank's. All recurrent layers are one group;
    layers that keep nothing are in none.

    Args:
        dtype: of the KV cache.
    """
    found: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, RecurrentLayer):
            found.setdefault(None, []).append(index)
            continue
        if layer.spec is None:
            continue
        spec = reach.of(index, layer.spec)
        key = (spec.kind, spec.regions(dtype_name(dtype)), spec.window, spec.sink_tokens)
        found.setdefault(key, []).append(index)
    return tuple(
        _recurrent(layers, members) if key is None else _attention(*key, members=members, dtype=dtype)
        for key, members in found.items()
    )


def _attention(
    kind: str,
    regions: tuple[Region, ...],
    window: int | None,
    sink_tokens: int,
    *,
    members: Sequence[int],
    dtype: torch.dtype,
) -> GroupSpec:
    *heads, head_dim = regions[0].shape
    return GroupSpec(
        layers=tuple(members),
        num_kv_heads=math.prod(heads),
        head_dim=head_dim,
        dtype=dtype_name(dtype),
        window=window,
        bytes_per_token=len(members) * sum(region_bytes(region) for region in regions),
        sink_tokens=sink_tokens,
        attention=kind,
        regions=() if kind == "heads" else regions,  # those of heads follow from their number
    )


def region_bytes(region: Region) -> int:
    """Of one token."""
    return math.prod(region.shape) * dtype_named(region.dtype).itemsize


def _recurrent(layers: Sequence[Layer | RecurrentLayer], members: Sequence[int]) -> GroupSpec:
    from headrace.engine.states import state_bytes, state_specs  # which needs the dtypes of this module

    specs = state_specs(layers)
    return GroupSpec(
        layers=tuple(members),
        num_kv_heads=0,
        head_dim=0,
        dtype=dtype_name(specs[members[0]].dtypes[-1]),
        state_bytes=state_bytes(specs[index] for index in members),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}: it is one of float32, float16, bfloat16")
    return dtype
