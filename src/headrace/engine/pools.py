"""The paged KV tensors of one rank: a pool of blocks for each layer group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, LayerCache
from headrace.engine.groups import dtype_named
from headrace.seam import GroupSpec


class KvPools:
    """K and V of every layer, in the backend's layout, zeroed. Which block holds what is the control half's affair."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: Sequence[int],
        *,
        block_size: int,
        backend: AttentionBackend,
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
        self._backend = backend
        self._caches: dict[int, LayerCache] = {}
        for group, blocks in zip(groups, num_blocks):
            shape = backend.kv_shape(blocks, block_size, group.num_kv_heads, group.head_dim)
            for layer in group.layers:
                k, v = (_zeros(shape, dtype_named(group.dtype), torch.device(device)) for _ in range(2))
                self._caches[layer] = LayerCache(k, v)

    @property
    def num_layers(self) -> int:
        return len(self._caches)

    @property
    def size_bytes(self) -> int:
        return sum(cache.k.nbytes + cache.v.nbytes for cache in self._caches.values())

    def layer(self, index: int) -> LayerCache:
        return self._caches[index]

    def copy(self, group: int, source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks in all layers of a group; ids are int64 [n], destinations distinct."""
        for layer in self.groups[group].layers:
            self._backend.copy_blocks(self._caches[layer], source, destination)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system hands out its zero pages on first touch, where torch would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
