"""Groups of rows of a batch, and how they are worked on in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_CHUNK_ELEMENTS = 1 << 24
"""Elements of [rows, vocab] that one piece of work may copy: 64 MiB in float32, 128 MiB in float64."""


def chunks(num_rows: int, width: int) -> Iterator[slice]:
    """Slices of 0 .. num_rows of at most `MAX_CHUNK_ELEMENTS` elements each (but of one row at least)."""
    size = max(1, MAX_CHUNK_ELEMENTS // max(1, width))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor, without waiting for the work queued on the device. On a CPU it shares the memory."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    # A copy from memory that isn't pinned waits for the stream; torch's cache of pinned memory makes pinning cheap.
    return host.pin_memory().to(device, non_blocking=True)


class RowGroup:
    """Some rows of a batch, in order. A group of every row is worked on in place, without copies."""

    __slots__ = ("host", "index")

    def __init__(self, host: NDArray[np.int64], num_rows: int, device: torch.device) -> None:
        self.host = host
        self.index = None if len(host) == num_rows else to_device(host, device)  # None: every row

    @classmethod
    def where(cls, mask: NDArray[np.bool_], device: torch.device) -> RowGroup:
        return cls(np.flatnonzero(mask), len(mask), device)

    def __len__(self) -> int:
        return len(self.host)

    def parts(self, width: int) -> Iterator[slice]:
        """Slices of the group (not of the batch), bounded for rows of `width` elements."""
        return chunks(len(self.host), width)

    def take(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        """These rows of `values` [rows, ...]; a view when the group is every row."""
        if self.index is None:
            return values[part]
        return values.index_select(0, self.index[part])

    def put(self, values: Tensor, new: Tensor, part: slice = slice(None)) -> None:
        if self.index is None:
            values[part] = new
        else:
            values.index_copy_(0, self.index[part], new)


class Upload:
    """A tensor on its way to the host, behind all that was queued when this was made."""

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._host = values
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> NDArray[Any]:
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy()
