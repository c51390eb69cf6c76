"""CUDA graphs of steps: one launch instead of hundreds, for the numbers of rows and tokens that come often."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headrace.engine.slots import SlotState
from headrace.seam import Ints

log = logging.getLogger("headrace.engine")

T = TypeVar("T")


class Graph(Protocol):
    def replay(self) -> None: ...


class GraphPool:
    """Memory that all captured steps share: they run one after another, and what one leaves is read before the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0
        """Of the device, that captured steps keep."""

    def capture(self, step: Callable[[], T]) -> tuple[Graph, T]:
        """Once without a graph, so that kernels are compiled and tuned. -> (the graph, what each replay leaves)"""
        step()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            left = step()
        self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph, left


class Captured(NamedTuple):
    """What a captured step leaves in place, until the next one overwrites it."""

    outputs: Tensor  # [3, padded rows] int64: token, was done, what is wrong
    logits: Tensor | None  # [padded rows, vocab], raw but for padding ids; of shaped steps


class DecodeGraphs:
    """Whole steps of generation rows. Captured when a size first comes, or before. Batches are padded to the next size
    with rows of the dummy slot.
    """

    def __init__(
        self, step: Callable[[Tensor, bool], Captured], sizes: Sequence[int], state: SlotState, pool: GraphPool
    ) -> None:
        """Args: step: (slots int64 [rows], is shaped) -> what it leaves; reads and writes only tensors that stay."""
        self._step = step
        self._sizes = sorted(sizes)
        self._state = state
        self._slots = torch.full((self._sizes[-1],), state.dummy, dtype=torch.int64, device=state.device)
        self._graphs: dict[tuple[int, bool], tuple[Graph, Captured]] = {}
        self._pool = pool

    def fits(self, num_rows: int) -> bool:
        """Whether a step of so many generation rows is run as a graph."""
        return 0 < num_rows <= self._sizes[-1]

    def run(self, slots: Ints, *, is_shaped: bool) -> Captured:
        """Queue the step of these slots, padded with the dummy slot.

        Args:
            is_shaped: whether a row is drawn or has rules; else all tokens are the most likely ones.
        """
        key = (self._sizes[bisect_left(self._sizes, len(slots))], is_shaped)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, captured = self._graphs[key]
        padded = torch.full((key[0],), self._state.dummy, dtype=torch.int64, pin_memory=self._slots.is_cuda)
        padded.numpy()[: len(slots)] = slots
        self._slots[: key[0]].copy_(padded, non_blocking=True)
        graph.replay()
        return captured

    def capture_all(self) -> None:
        """What isn't yet, instead of when it first comes. The largest first, so that the smaller find room in its
        memory. Those of drawn rows come with the first."""
        for size in reversed(self._sizes):
            if (size, False) not in self._graphs:
                self._graphs[size, False] = self._capture(size, False)

    def drop(self) -> None:
        """Tensors that graphs read have moved: capture again when needed."""
        self._graphs.clear()

    def _capture(self, size: int, is_shaped: bool) -> tuple[Graph, Captured]:
        """On dummy rows, which change nothing."""
        slots = self._slots[:size]
        slots.fill_(self._state.dummy)
        found = self._pool.capture(lambda: self._step(slots, is_shaped))
        log.debug("captured a step of %d rows; graphs keep %d MiB", size, self._pool.num_bytes >> 20)
        return found
