"""CUDA graphs of generation steps: one launch instead of hundreds, for the numbers of rows that come often."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.slots import SlotState
from headrace.engine.staging import Upload
from headrace.seam import Ints

log = logging.getLogger("headrace.engine")


class Graphs(Protocol):
    def fits(self, num_rows: int) -> bool:
        """Whether a step of so many generation rows is run as a graph."""
        ...

    def run(self, slots: Ints) -> Upload:
        """Queue the step of these slots. -> its outputs, padded"""
        ...

    def drop(self) -> None:
        """Tensors that graphs read have moved: capture again when needed."""
        ...


class _NoGraphs:
    def fits(self, num_rows: int) -> bool:
        return False

    def run(self, slots: Ints) -> Upload:
        raise AssertionError("no graphs")

    def drop(self) -> None:
        pass


NO_GRAPHS: Graphs = _NoGraphs()


class DecodeGraphs:
    """Captured when a size first comes. Batches are padded to the next size with rows of the dummy slot.

    All sizes share one memory pool: steps run one after another, and each output is copied out before the next.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], sizes: Sequence[int], state: SlotState) -> None:
        """Args: step: slots int64 [rows] -> outputs int64 [n, rows]; reads and writes only tensors that stay."""
        self._step = step
        self._sizes = sorted(sizes)
        self._state = state
        self._slots = torch.full((self._sizes[-1],), state.dummy, dtype=torch.int64, device=state.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def fits(self, num_rows: int) -> bool:
        return 0 < num_rows <= self._sizes[-1]

    def run(self, slots: Ints) -> Upload:
        size = self._sizes[bisect_left(self._sizes, len(slots))]
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, outputs = self._graphs[size]
        padded = torch.full((size,), self._state.dummy, dtype=torch.int64, pin_memory=True)
        padded.numpy()[: len(slots)] = slots
        self._slots[:size].copy_(padded, non_blocking=True)
        graph.replay()
        return Upload(outputs)

    def drop(self) -> None:
        self._graphs.clear()

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """On dummy rows, which change nothing. Once without a graph, so that kernels are compiled and tuned."""
        slots = self._slots[:size]
        slots.fill_(self._state.dummy)
        self._step(slots)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = self._step(slots)
        log.debug("captured a step of %d rows", size)
        return graph, outputs
