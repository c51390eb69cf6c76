"""The paged KV tensors of one rank: an arena of blocks for each layer group.

A block's bytes lie in one piece: the regions (K, then V, say) of each of its group's layers in turn, or one snapshot of
all recurrent states. So a block moves between tiers as one copy. What a layer sees is a view in the backend's layout
whose blocks are a whole block of the group apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend
from headrace.engine.backends import Backends
from headrace.engine.groups import dtype_named, region_bytes
from headrace.seam import GroupSpec, Region

MAX_GATHER_BYTES = 64 << 20
"""Most that copies within a pool hold in between."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class KvPools:
    """Blocks of every layer, zeroed. Which block holds what is the control half's affair."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: Sequence[int],
        *,
        block_size: int,
        backends: Backends,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            num_blocks: by group, the dummy block 0 included.
            block_size: tokens a block.
        """
        assert len(groups) == len(num_blocks), (groups, num_blocks)
        self.groups = tuple(groups)
        self.block_size = block_size
        self.arenas: list[Tensor] = []
        """By group, uint8 [blocks, bytes of a block]."""
        found: dict[int, dict[str, Tensor]] = {}
        kinds: dict[int, str] = {}
        for group, blocks in zip(groups, num_blocks):
            if group.is_recurrent:
                self.arenas.append(zeroed((blocks, group.state_bytes), torch.uint8, torch.device(device)))
                continue
            size_bytes = group.block_bytes(block_size)
            arena = zeroed((blocks, size_bytes), torch.uint8, torch.device(device))
            self.arenas.append(arena)
            backend, regions, entries = backends.of(group.attention), _regions(group), group.entries(block_size)
            layer_bytes = size_bytes // len(group.layers)
            for at, layer in enumerate(group.layers):
                part = arena[:, at * layer_bytes : (at + 1) * layer_bytes]
                found.setdefault(layer, {}).update(_views(part, regions, backend, entries))
                kinds[layer] = group.attention
        self._caches: dict[int, Any] = {layer: backends.of(kinds[layer]).bind(views) for layer, views in found.items()}

    @property
    def num_layers(self) -> int:
        """Those with blocks of tokens."""
        return len(self._caches)

    @property
    def size_bytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    def layer(self, index: int) -> Any:
        """The cache that the layer's backend made of its regions; a region's block is contiguous, neighbours apart."""
        return self._caches[index]

    def copy(self, group: int, source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks in all layers of a group; ids are int64 [n], destinations distinct.

        All sources of up to MAX_GATHER_BYTES are read before a destination is written.
        """
        copy_rows(self.arenas[group], source, self.arenas[group], destination)


def _regions(group: GroupSpec) -> tuple[Region, ...]:
    shape = (group.num_kv_heads, group.head_dim)
    return group.regions or (Region("k", shape, group.dtype), Region("v", shape, group.dtype))


def _views(part: Tensor, regions: Sequence[Region], backend: AttentionBackend, entries: int) -> dict[str, Tensor]:
    """part: uint8 [blocks, bytes of one layer] -> by name, [blocks, *the backend's shape]"""
    views: dict[str, Tensor] = {}
    at = 0
    for region in regions:
        size_bytes = region_bytes(region) * entries
        shape = backend.block_shape(region.shape, entries)
        views[region.name] = part[:, at : at + size_bytes].view(dtype_named(region.dtype)).unflatten(1, shape)
        at += size_bytes
    return views


def copy_rows(source: Tensor, source_rows: Tensor, destination: Tensor, destination_rows: Tensor) -> None:
    """destination[destination_rows] = source[source_rows], of uint8 [n, bytes] on one device; rows are int64."""
    source, destination = in_words(source), in_words(destination)
    count = max(1, MAX_GATHER_BYTES // (source.shape[1] * source.itemsize))
    for some, others in zip(source_rows.split(count), destination_rows.split(count)):
        destination.index_copy_(0, others, source.index_select(0, some))


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on the device. Pinned on its way there: otherwise the upload would wait for the steps before it."""
    is_cuda = device.type == "cuda"
    return torch.tensor(rows, dtype=torch.int64, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def in_words(rows: Tensor) -> Tensor:
    """uint8 [n, bytes] as the widest integers that fit: devices move words, not bytes."""
    for dtype in WORDS:
        if rows.shape[1] % dtype.itemsize == 0:
            return rows.view(dtype)
    raise AssertionError("bytes always fit")


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system hands out its zero pages on first touch, where torch would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
