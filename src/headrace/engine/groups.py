"""Layer groups: layers whose KV has the same shape, dtype and window share block tables and a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from headrace.attention._latent import LatentSpec
from headrace.attention._sparse import SparseSpec
from headrace.attention.port import AttentionSpec, CachePart, CacheSpec, PartedSpec
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
        if isinstance(spec, PartedSpec):
            raise ValueError(
                f"kv_cache_config.max_attention_window and sink_token_length: layer {layer} sees its window of"
                f" {spec.window} tokens and compressed ones before it, which can't be changed: leave both out"
            )
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
    layers that keep nothing, or attend to what another keeps, are in none.

    Args:
        dtype: of the KV cache.
    """
    found: dict[Any, list[int]] = {}
    shared = shared_layers(layers)
    for index, layer in enumerate(layers):
        if isinstance(layer, RecurrentLayer):
            found.setdefault(None, []).append(index)
            continue
        if layer.spec is None or index in shared:
            continue
        spec = reach.of(index, layer.spec)
        for part in parts_of(spec, dtype_name(dtype)):
            found.setdefault((spec.kind, part, spec.sink_tokens), []).append(index)
    return tuple(
        _recurrent(layers, members) if key is None else _attention(*key, members=members, dtype=dtype)
        for key, members in found.items()
    )


def shared_layers(layers: Sequence[Layer | RecurrentLayer]) -> dict[int, int]:
    """Layers that attend to the keys and values of another -> that one."""
    found: dict[int, int] = {}
    for index, layer in enumerate(layers):
        spec = None if isinstance(layer, RecurrentLayer) else layer.spec
        if isinstance(spec, AttentionSpec) and spec.source is not None:
            found[index] = spec.source
    return found


def parts_of(spec: CacheSpec, dtype: str) -> tuple[CachePart, ...]:
    """What a layer keeps, one layer group each. dtype: of the KV cache."""
    if isinstance(spec, PartedSpec):
        return spec.parts(dtype)
    return (CachePart(spec.regions(dtype), spec.window),)


def _attention(
    kind: str, part: CachePart, sink_tokens: int, *, members: Sequence[int], dtype: torch.dtype
) -> GroupSpec:
    regions = part.regions
    *heads, head_dim = regions[0].shape
    entry_bytes = len(members) * sum(region_bytes(region) for region in regions)
    return GroupSpec(
        layers=tuple(members),
        num_kv_heads=math.prod(heads),
        head_dim=head_dim,
        dtype=dtype_name(dtype),
        window=part.window,
        bytes_per_token=-(-entry_bytes // part.every),
        sink_tokens=sink_tokens,
        attention=kind,
        regions=() if kind == "heads" else regions,  # those of heads follow from their number
        every=part.every,
        entry_bytes=entry_bytes if part.every > 1 else 0,
    )


def region_bytes(region: Region) -> int:
    """Of one entry."""
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
