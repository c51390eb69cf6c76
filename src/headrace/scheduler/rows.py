"""The rows of a section: what is planned, and the arrays that say it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.scheduler.beam import BeamRows
from headrace.scheduler.request import Active
from headrace.seam import FROM_DEVICE, HOST_TOKEN, PROMPT_LOGPROBS, SAMPLE, Section, ints


@dataclass(slots=True)
class ContextRow:
    """A planned chunk: `count` known tokens of `active` from `start`."""

    active: Active
    start: int
    count: int
    samples: bool
    """The chunk ends with the last known token."""


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

    def section(self, generation: NDArray[np.int64], tokens_per_row: int) -> Section:
        """The rows' part of a section; changes of slots and blocks are added by `Changes`."""
        num = len(generation)
        drafts = np.zeros(len(self.slot) + num, np.int32)
        drafts[len(self.slot) :] = tokens_per_row - 1
        return Section(
            slot=np.concatenate([ints(self.slot), generation.astype(np.int32)]),
            num_tokens=np.concatenate([ints(self.count), np.full(num, tokens_per_row, np.int32)]),
            start=np.concatenate([ints(self.start), np.full(num, FROM_DEVICE, np.int32)]),
            num_drafts=drafts,
            tree=np.zeros_like(drafts),
            flags=np.concatenate([ints(self.flags), np.full(num, SAMPLE, np.int32)]),
            num_context_rows=len(self.slot),
            ids=ints(self.ids),
            next_ids=ints(self.next_ids),
        )
