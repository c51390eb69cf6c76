"""The device's blocks, as a connector to an external store reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.pools import row_index


class DeviceBlocks:
    """Implements `transfer.port.KvMemory`, in the order of the calling thread's current stream."""

    def __init__(self, arenas: Sequence[Tensor]) -> None:
        """Args: arenas: by group, uint8 [blocks, bytes]."""
        self.arenas = arenas

    def read(self, group: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        arena = self.arenas[group]
        return arena.index_select(0, row_index(blocks, arena.device)).cpu().numpy()

    def write(self, group: int, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        arena = self.arenas[group]
        arena.index_copy_(0, row_index(blocks, arena.device), torch.from_numpy(rows).to(arena.device))
