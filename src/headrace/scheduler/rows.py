"""The rows of a section: what is planned, and the arrays that say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headrace.scheduler.beam import BeamRows
from headrace.scheduler.changes import Changes
from headrace.scheduler.request import Active
from headrace.seam import (
    FROM_DEVICE,
    HOST_TOKEN,
    LAST_HIDDEN,
    NO_INTS,
    PROMPT_LOGPROBS,
    SAMPLE,
    SUM_HIDDEN,
    Ints,
    Section,
    ints,
)


@dataclass(slots=True)
class ContextRow:
    """A planned chunk: `count` known tokens of `active` from `start`."""

    active: Active
    start: int
    count: int
    samples: bool
    """The chunk ends with the last known token, and the next one is wanted."""

    @property
    def pools(self) -> bool:
        """The chunk ends a prompt whose hidden states are wanted, and no token."""
        return bool(self.active.request.pooling) and self.start + self.count == len(self.active.tokens)


@dataclass(slots=True)
class Planned:
    """What commit needs to know of a section's rows, in the plan's order."""

    context: list[ContextRow] = field(default_factory=list[ContextRow])
    beams: list[BeamRows] = field(default_factory=list[BeamRows])
    generation: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Slots of the generation rows; each slot keeps its owner while it has rows in flight."""

    @property
    def num_rows(self) -> int:
        return len(self.context) + sum(len(rows.slots) for rows in self.beams) + len(self.generation)


@cache
def _generating(tokens_per_row: int) -> Ints:
    """[5, 1] What every generation row says besides its slot: tokens, start, drafts, tree, flags."""
    return ints([[tokens_per_row], [FROM_DEVICE], [tokens_per_row - 1], [0], [SAMPLE]])


class RowArrays:
    """Collects the rows that carry host ids, then joins the generation rows behind them."""

    def __init__(self) -> None:
        self.slot: list[int] = []
        self.count: list[int] = []
        self.start: list[int] = []
        self.flags: list[int] = []
        self.ids: list[int] = []
        self.next_ids: list[int] = []

    def add_context(self, row: ContextRow) -> None:
        active = row.active
        end = row.start + row.count
        flags = SAMPLE if row.samples else 0
        if row.samples and active.request.beam is not None:
            flags |= HOST_TOKEN
        if active.request.pooling == "mean":
            flags |= SUM_HIDDEN
        elif row.pools:
            flags |= LAST_HIDDEN
        wants_prompt = active.request.sampling.prompt_logprobs >= 0 and not active.prompt_logprobs_done
        if wants_prompt:
            flags |= PROMPT_LOGPROBS
        self._add(active.slot, row.start, active.tokens[row.start : end], flags)
        # The last prompt token's own target is sampled, not given; what was generated is no prompt.
        in_prompt = wants_prompt and end < len(active.request.prompt)
        self.next_ids.append(active.tokens[end] if in_prompt else -1)

    def add_beams(self, rows: BeamRows) -> None:
        for slot, token, start in zip(rows.slots, rows.ids, rows.starts, strict=True):
            self._add(slot, start, [token], SAMPLE | HOST_TOKEN)
            self.next_ids.append(-1)

    def _add(self, slot: int, start: int, tokens: list[int], flags: int) -> None:
        self.slot.append(slot)
        self.count.append(len(tokens))
        self.start.append(start)
        self.flags.append(flags)
        self.ids.extend(tokens)

    def section(self, generation: NDArray[np.int64], tokens_per_row: int, changes: Changes) -> Section:
        num_context = len(self.slot)
        rows: Ints = np.empty((6, num_context + len(generation)), np.int32)
        slot, num_tokens, start, num_drafts, tree, flags = rows
        if num_context:
            no_tree = no_drafts = [0] * num_context
            rows[:, :num_context] = self.slot, self.count, self.start, no_drafts, no_tree, self.flags
        slot[num_context:] = generation
        rows[1:, num_context:] = _generating(tokens_per_row)
        return Section(
            slot=slot,
            num_tokens=num_tokens,
            start=start,
            num_drafts=num_drafts,
            tree=tree,
            flags=flags,
            num_context_rows=num_context,
            ids=ints(self.ids) if num_context else NO_INTS,
            next_ids=ints(self.next_ids) if num_context else NO_INTS,
            blocks=changes.take_blocks(),
            freed_slots=changes.take_freed(),
            inits=changes.take_inits(),
            copies=changes.kv.take_copies(),
            transfers=changes.kv.take_transfers(),
            restores=changes.kv.take_restores(),
            saves=changes.kv.take_saves(),
            external=changes.external.take_work(),
        )
