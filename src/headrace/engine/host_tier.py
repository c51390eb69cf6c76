"""The host tier's memory. On CUDA it is pinned by a thread, piece by piece, so that serving starts at once."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("headrace.engine")

CHUNK_BYTES = 64 << 20
"""Pinned at once: few enough that the driver is never held up for long."""
CLOSE_TIMEOUT_S = 2.0

Bytes = NDArray[np.uint8]


class HostTier:
    """An arena of blocks a group, without any when there is no host tier.

    The system gives pages on first touch. On CUDA a thread touches and pins them from block 0 on; `wait` is for
    whoever needs a block before. Where pinning is refused the rest stays as it is: right, and slower.
    """

    def __init__(self, block_bytes: Sequence[int], num_blocks: Sequence[int], device: torch.device) -> None:
        """
        Raises:
            MemoryError: the system has not so much.
        """
        self._device = device
        self.arrays = [_reserved(count, size) for count, size in zip(num_blocks, block_bytes)]
        """By group, uint8 [blocks, bytes]."""
        self.rows: list[Tensor] = [torch.from_numpy(array) for array in self.arrays]
        self.chunk_blocks = [_chunk_blocks(size) for size in block_bytes]
        """Blocks that are pinned together: no copy may cross from one chunk into the next."""
        self._num_ready = [0 if device.type == "cuda" else len(array) for array in self.arrays]
        self._progress = threading.Condition()
        self._pinned: list[int] = []
        """Addresses."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._pin, name="headrace-pin", daemon=True)
        if device.type == "cuda" and self.arrays:
            self._thread.start()

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def wait(self, group: int, block: int) -> None:
        """Until the block may be copied to and from."""
        if block >= self._num_ready[group]:
            with self._progress:
                self._progress.wait_for(lambda: block < self._num_ready[group])

    def close(self) -> None:
        """Unpin: memory that goes back to the system pinned would stay pinned. No copy may be on its way."""
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._pinned:
            runtime: Any = torch.cuda.cudart()
            for address in self._pinned:
                runtime.cudaHostUnregister(address)
            self._pinned.clear()

    # ---- the thread --------------------------------------------------------------------------

    def _pin(self) -> None:
        can_pin = True
        for group, array in enumerate(self.arrays):
            step = self.chunk_blocks[group]
            for begin in range(0, len(array), step):
                chunk = array[begin : begin + step]
                if can_pin and not self._is_closing:
                    chunk.reshape(-1)[:: mmap.PAGESIZE] = 0  # the pages come here, not under the driver's lock
                    can_pin = self._pin_chunk(chunk)
                with self._progress:
                    self._num_ready[group] = begin + len(chunk)
                    self._progress.notify_all()

    def _pin_chunk(self, chunk: Bytes) -> bool:
        problem = ""
        try:
            runtime: Any = torch.cuda.cudart()
            with torch.cuda.device(self._device):
                code = int(runtime.cudaHostRegister(chunk.ctypes.data, chunk.nbytes, 0))
            problem = f"CUDA error {code}" if code else ""
        except Exception as error:  # whatever it is, the memory is there and others wait for it
            problem = str(error).splitlines()[0]
        if not problem:
            self._pinned.append(chunk.ctypes.data)
            return True
        done = sum(count * array.shape[1] for count, array in zip(self._num_ready, self.arrays))
        log.warning(
            "kv_cache_config.host_cache_size: pinned %s of %s bytes, the system refuses more (%s): copies of the rest"
            " are slower; raise the limit of locked memory (ulimit -l), or lower the size",
            f"{done:,}",
            f"{self.size_bytes:,}",
            problem,
        )
        return False


def _reserved(num_blocks: int, block_bytes: int) -> Bytes:
    """Zero pages on first touch. Mapped, so that it begins at a page and isn't part of the allocator's heap."""
    num_bytes = num_blocks * block_bytes
    if not num_bytes:
        return np.zeros((num_blocks, block_bytes), np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(
            f"kv_cache_config.host_cache_size: {num_bytes:,} bytes of main memory are not to be had ({error}): lower it"
        ) from None
    if num_bytes >= CHUNK_BYTES:
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(num_blocks, block_bytes)


def _chunk_blocks(block_bytes: int) -> int:
    """Blocks a chunk: whole pages, about CHUNK_BYTES."""
    smallest = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, block_bytes)
    return smallest * max(1, CHUNK_BYTES // (smallest * block_bytes))
