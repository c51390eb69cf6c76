"""CUDA graphs of forward passes whose sampling stays outside: steps with prompts, and rows that wait for the host.

A short prompt's pass is hundreds of launches of kernels that are shorter than a launch. What a graph can't know stands
in tensors that stay: rows, their slots and places, token ids; it is padded with rows of the dummy slot to one of few
shapes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.batch import Batch, Rows, Wanted, context_rows_of
from headrace.engine.graphs import Graph, GraphPool
from headrace.engine.slots import SlotState
from headrace.seam import FROM_DEVICE, SAMPLE, Section, ints

log = logging.getLogger("headrace.engine")

TOKEN_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of prompts in a step. With more of them the device is busy for longer than the host takes to queue it."""
MAX_CONTEXT_ROWS = 8
MAX_GENERATION_ROWS = 256
MAX_GRAPHS = 128
CAPTURED_AT = 3
"""Times that a shape comes until it is captured: that takes as long as some passes without a graph."""


class Shape(NamedTuple):
    """Of a padded step."""

    num_context: int
    """Context rows, the last of which has the tokens that pad; 0 without prompts."""
    num_tokens: int
    """Of the context rows."""
    num_generation: int

    @property
    def num_rows(self) -> int:
        return self.num_context + self.num_generation


class Forward(NamedTuple):
    """What a pass leaves in place, until the next one overwrites it."""

    batch: Batch
    wanted: Wanted
    hidden: Tensor  # [padded rows, hidden], of each row's last token


class ForwardGraphs:
    """Owns the inputs of captured passes, and the graphs by shape."""

    def __init__(
        self,
        forward: Callable[[Rows, Tensor], tuple[Batch, Tensor]],
        state: SlotState,
        pool: GraphPool,
        *,
        token_sizes: Sequence[int],
        max_len: int,
        wants_lengths: Callable[[Sequence[tuple[int, int]]], bool],
    ) -> None:
        """
        Args:
            forward: (rows, packed tokens whose hidden states are wanted) -> the batch, and these states; reads and
                writes only tensors that stay.
            token_sizes: what prompts are padded to; none captures no step with prompts.
            max_len: the longest sequence.
            wants_lengths: `Runner.wants_lengths`: steps that don't become graphs.
        """
        self._forward = forward
        self._state = state
        self._pool = pool
        # The row that pads must not be longer than a table of blocks.
        self._token_sizes = sorted(size for size in token_sizes if size <= max_len)
        self._max_len = max_len
        self._wants_lengths = wants_lengths
        largest = Shape(MAX_CONTEXT_ROWS + 1, max(self._token_sizes, default=0), MAX_GENERATION_ROWS)
        self._packed = torch.zeros(sum(_sizes(largest)), dtype=torch.int64, device=state.device)
        self._seen: Counter[Shape] = Counter()
        self._graphs: dict[Shape, tuple[Graph, tuple[Batch, Tensor]]] = {}

    def run(self, section: Section) -> Forward | None:
        """Queue the pass as a graph; None if it has none, yet or ever."""
        shape = self._shape(section)
        if shape is None:
            return None
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] < CAPTURED_AT or len(self._graphs) >= MAX_GRAPHS:
                return None
            self._graphs[shape] = self._capture(shape)
        place = np.arange(section.num_rows)
        place[section.num_context_rows :] += shape.num_context - section.num_context_rows
        sample_rows = np.flatnonzero(section.flags & SAMPLE)
        starts = self._upload(
            shape,
            place,
            slots=section.slot,
            start=section.start,
            counts=section.num_tokens,
            ids=section.ids,
            sampled=place[sample_rows],
        )
        graph, (batch, hidden) = self._graphs[shape]
        graph.replay()
        sampled = self._views(shape)[-1][: len(sample_rows)]
        wanted = Wanted(starts, sample_rows, ints().astype(np.int64), place, sampled, sampled, sampled)
        return Forward(batch, wanted, hidden)

    def capture_all(self) -> None:
        """One prompt alone, of each size: what decides the time to the first token of a server at rest."""
        for size in reversed(self._token_sizes):
            shape = Shape(2, size, 0)
            if shape not in self._graphs and not self._wants_lengths([(size, size)]):
                self._graphs[shape] = self._capture(shape)

    def drop(self) -> None:
        """Tensors that graphs read have moved: capture again when needed."""
        self._graphs.clear()

    def _shape(self, section: Section) -> Shape | None:
        num_context = section.num_context_rows
        num_generation = section.num_rows - num_context
        num_tokens = len(section.ids)
        if (section.flags & ~SAMPLE).any() or section.num_drafts.any():
            return None
        if num_context > MAX_CONTEXT_ROWS or num_generation > MAX_GENERATION_ROWS:
            return None
        padded = _power_of_2(num_generation)
        if not num_context:
            return Shape(0, 0, padded)
        at = bisect_left(self._token_sizes, num_tokens)
        if at == len(self._token_sizes) or self._wants_lengths(context_rows_of(section)):
            return None
        return Shape(_power_of_2(num_context) + 1, self._token_sizes[at], padded)

    def _upload(
        self,
        shape: Shape,
        place: NDArray[np.int64],
        *,
        slots: NDArray[np.integer],
        start: NDArray[np.integer],
        counts: NDArray[np.integer],
        ids: NDArray[np.integer],
        sampled: NDArray[np.integer],
    ) -> NDArray[np.int64]:
        """Fill the tensors that stay, in one copy. -> [padded rows + 1] where rows start among the packed tokens

        Args:
            place: [rows] where each row stands among the padded ones.
            sampled: of `place`, those that yield a token.
        """
        cuda = self._packed.is_cuda
        host = torch.zeros(sum(_sizes(shape)), dtype=torch.int64, pin_memory=cuda)
        bounds = np.cumsum([0, *_sizes(shape)]).tolist()
        parts = [host.numpy()[begin:end] for begin, end in pairwise(bounds)]
        row_slots, row_start, row_counts, starts, of_token, inside, known, row_sampled = parts
        row_slots[:], row_start[:] = self._state.dummy, FROM_DEVICE
        row_slots[place], row_start[place], row_counts[place] = slots, start, counts
        row_counts[shape.num_context :] = 1
        if shape.num_context:
            row_counts[shape.num_context - 1] = shape.num_tokens - len(ids)
        starts[1:] = np.cumsum(row_counts)
        of_token[:] = np.repeat(np.arange(shape.num_rows), row_counts)
        inside[:] = np.arange(len(inside)) - starts[of_token]
        known[: len(ids)], row_sampled[: len(sampled)] = ids, sampled
        # The cache of pinned memory hands `host` out again only after this copy.
        self._packed[: len(host)].copy_(host, non_blocking=True)
        return starts

    def _views(self, shape: Shape) -> list[Tensor]:
        sizes = _sizes(shape)
        return list(self._packed[: sum(sizes)].split(sizes))

    def _capture(self, shape: Shape) -> tuple[Graph, tuple[Batch, Tensor]]:
        """On dummy rows, which change nothing."""
        nothing = np.zeros(0, np.int64)
        self._upload(shape, nothing, slots=nothing, start=nothing, counts=nothing, ids=nothing, sampled=nothing)
        slots, start, counts, starts, of_token, inside, ids, _ = self._views(shape)
        rows = Rows(
            slots,
            start,
            counts,
            starts,
            of_token,
            inside,
            ids,
            shape.num_context,
            context_starts=(0,),
            max_query=max(shape.num_tokens, 1),
            max_kv=self._max_len,
        )
        found = self._pool.capture(lambda: self._forward(rows, (starts[1:] - 1).clamp(min=0)))
        log.debug("captured a pass of %s; graphs keep %d MiB", shape, self._pool.num_bytes >> 20)
        return found


def _power_of_2(number: int) -> int:
    """The smallest one that is not less; 0 stays."""
    return 1 << (number - 1).bit_length() if number else 0


def _sizes(shape: Shape) -> list[int]:
    """Of slots, starts, token counts, where rows start, each token's row and place in it, ids, rows that sample."""
    rows, tokens = shape.num_rows, shape.num_tokens + shape.num_generation
    return [rows, rows, rows, rows + 1, tokens, tokens, shape.num_tokens, rows]
