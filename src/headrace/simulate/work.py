"""What a step computes, in counts: read off its plan, by a modelled engine and by the recorder of a real one alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.seam import FROM_DEVICE, SAMPLE, GroupSpec, Ints, Section

Longs = NDArray[np.int64]

MAX_STEPS = 4096
"""That are worked out at once."""
COUNTING = np.arange(1, MAX_STEPS + 1, dtype=np.int64)


@dataclass(slots=True)  # frozen ones take three times as long to make, and every step has one
class Work:
    """One step of one section. Of a run of steps, `pairs` and `reads` are arrays with an entry a step."""

    num_rows: int
    num_tokens: int
    num_sampled: int
    """Rows that yield a token: those that the head is computed for."""
    pairs: tuple[int | Longs, ...]
    """By layer group, (query, key) pairs of one layer; of a recurrent group, tokens."""
    reads: tuple[int | Longs, ...]
    """By layer group, tokens whose keys and values are read; of a recurrent group, states."""


class Ledger:
    """How many tokens of each slot are in the cache, as the device knows it: plans say where generation rows begin
    only by what was planned before."""

    def __init__(self, groups: Sequence[GroupSpec], num_slots: int) -> None:
        self.groups = tuple(groups)
        self.length = np.zeros(num_slots, np.int64)

    def take(self, section: Section) -> Work:
        """The section's work, and the lengths after it."""
        if not section.num_context_rows and not np.count_nonzero(section.num_drafts):
            return self._generated(section.slot)
        slot, count = section.slot.astype(np.int64), section.num_tokens.astype(np.int64)  # [rows]
        start = np.where(section.start == FROM_DEVICE, self.length[slot], section.start)
        self.length[slot] = start + count
        return self._work(start, count, num_sampled=int(np.count_nonzero(section.flags & SAMPLE)))

    def _generated(self, slot: Ints) -> Work:
        """One token for each: the same as `_work` says, and sooner."""
        length = self.length[slot] + 1
        self.length[slot] = length
        num_rows, num_cached = len(slot), int(np.add.reduce(length))
        seen: list[int] = []
        for group in self.groups:
            if group.is_recurrent:
                seen.append(num_rows)
            elif group.window is None:
                seen.append(num_cached)
            else:
                seen.append(int(np.minimum(length, group.window).sum()))
        return Work(num_rows, num_rows, num_rows, tuple(seen), tuple(seen))

    def _work(self, start: Longs, count: Longs, *, num_sampled: int) -> Work:
        num_rows, num_tokens, num_cached = len(count), int(count.sum()), int(start.sum())
        pairs: list[int] = []
        reads: list[int] = []
        for group in self.groups:
            if group.is_recurrent:
                pairs.append(num_tokens)
                reads.append(num_rows)
            elif group.window is None:
                pairs.append(int(count @ start) + (int(count @ count) + num_tokens) // 2)
                reads.append(num_cached + num_tokens)
            else:
                pairs.append(int(_pairs(start, count, group.window).sum()))
                reads.append(int(np.minimum(start + count, group.window - 1 + count).sum()))
        return Work(num_rows, num_tokens, num_sampled, tuple(pairs), tuple(reads))

    def decode(self, slots: Longs, num_steps: int) -> Work:
        """Of the next steps that have one generation row for each of these slots and nothing else."""
        length = self.length[slots]  # [rows]
        after = COUNTING[:num_steps]
        seen: list[Longs | int] = []
        for group in self.groups:
            if group.is_recurrent:
                seen.append(len(slots))
            elif group.window is None:
                seen.append(int(length.sum()) + after * len(slots))
            else:
                seen.append(np.minimum(length + after[:, None], group.window).sum(1))
        return Work(len(slots), len(slots), len(slots), tuple(seen), tuple(seen))


def _pairs(start: Longs, count: Longs, window: int) -> Longs:
    """[rows] Sum over the row's tokens of the tokens that each one sees, itself included."""
    growing = np.clip(window - start, 0, count)  # tokens that see everything before them
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window
