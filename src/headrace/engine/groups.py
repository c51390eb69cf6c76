"""Layer groups: layers whose KV has the same shape, dtype and window share block tables and a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.layers.port import Layer
from headrace.seam import GroupSpec


def group_layers(layers: Sequence[Layer], dtype: torch.dtype) -> tuple[GroupSpec, ...]:
    """Groups in the order of their first layer; heads and bytes are this rank's. dtype: of the KV cache."""
    found: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        key = (layer.spec.num_kv_heads, layer.spec.head_dim, layer.spec.window)
        found.setdefault(key, []).append(index)
    return tuple(
        GroupSpec(
            layers=tuple(members),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype_name(dtype),
            window=window,
            bytes_per_token=2 * len(members) * num_kv_heads * head_dim * dtype.itemsize,
        )
        for (num_kv_heads, head_dim, window), members in found.items()
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
