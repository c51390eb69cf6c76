"""CUDA graphs of generation steps: one launch instead of hundreds, for the numbers of rows that come often."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.engine.slots import SlotState
from headrace.seam import Ints

log = logging.getLogger("headrace.engine")


class Captured(NamedTuple):
    """What a captured step leaves in place, until the next one overwrites it."""

    outputs: Tensor  # [3, padded rows] int64: token, was done, what is wrong
    logits: Tensor | None  # [padded rows, vocab], raw but for padding ids; of shaped steps


class Graphs(Protocol):
    @property
    def num_bytes(self) -> int:
        """Of the device, that captured steps keep."""
        ...

    def fits(self, num_rows: int) -> bool:
        """Whether a step of so many generation rows is run as a graph."""
        ...

    def run(self, slots: Ints, *, is_shaped: bool) -> Captured:
        """Queue the step of these slots, padded with the dummy slot.

        Args:
            is_shaped: whether a row is drawn or has rules; else all tokens are the most likely ones.
        """
        ...

    def capture_all(self) -> None:
        """Capture what isn't yet, instead of when it first comes."""
        ...

    def drop(self) -> None:
        """Tensors that graphs read have moved: capture again when needed."""
        ...


class _NoGraphs:
    num_bytes = 0

    def fits(self, num_rows: int) -> bool:
        return False

    def run(self, slots: Ints, *, is_shaped: bool) -> Captured:
        raise AssertionError("no graphs")

    def capture_all(self) -> None:
        pass

    def drop(self) -> None:
        pass


NO_GRAPHS: Graphs = _NoGraphs()


class DecodeGraphs:
    """Captured when a size first comes, or before. Batches are padded to the next size with rows of the dummy slot.

    All sizes share one memory pool: steps run one after another, and each output is copied out before the next.
    """

    def __init__(self, step: Callable[[Tensor, bool], Captured], sizes: Sequence[int], state: SlotState) -> None:
        """Args: step: (slots int64 [rows], is shaped) -> what it leaves; reads and writes only tensors that stay."""
        self._step = step
        self._sizes = sorted(sizes)
        self._state = state
        self._slots = torch.full((self._sizes[-1],), state.dummy, dtype=torch.int64, device=state.device)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Captured]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    def fits(self, num_rows: int) -> bool:
        return 0 < num_rows <= self._sizes[-1]

    def run(self, slots: Ints, *, is_shaped: bool) -> Captured:
        key = (self._sizes[bisect_left(self._sizes, len(slots))], is_shaped)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, captured = self._graphs[key]
        padded = torch.full((key[0],), self._state.dummy, dtype=torch.int64, pin_memory=True)
        padded.numpy()[: len(slots)] = slots
        self._slots[: key[0]].copy_(padded, non_blocking=True)
        graph.replay()
        return captured

    def capture_all(self) -> None:
        """The largest first, so that the smaller find room in its memory. Those of drawn rows come with the first."""
        for size in reversed(self._sizes):
            if (size, False) not in self._graphs:
                self._graphs[size, False] = self._capture(size, False)

    def drop(self) -> None:
        self._graphs.clear()

    def _capture(self, size: int, is_shaped: bool) -> tuple[torch.cuda.CUDAGraph, Captured]:
        """On dummy rows, which change nothing. Once without a graph, so that kernels are compiled and tuned."""
        slots = self._slots[:size]
        slots.fill_(self._state.dummy)
        self._step(slots, is_shaped)
        before = torch.cuda.memory_reserved(slots.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            captured = self._step(slots, is_shaped)
        self.num_bytes += max(0, torch.cuda.memory_reserved(slots.device) - before)
        log.debug("captured a step of %d rows; graphs keep %d MiB", size, self.num_bytes >> 20)
        return graph, captured
