"""Applying a result: tokens to requests, requests to their end, blocks to the prefix index."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.scheduler.beam import BeamRows
from headrace.scheduler.request import Active, closed, stamp
from headrace.scheduler.rows import ContextRow, Planned
from headrace.scheduler.section import SectionScheduler
from headrace.seam import NO_TOKEN, Ints, RowLogprobs, SectionResult
from headrace.types import Delta, FinishReason, Logprobs, Request


@dataclass(slots=True)
class Committed:
    """What one section's result brought."""

    plain_ids: list[NDArray[np.int64]] = field(
        default_factory=list[NDArray[np.int64]]
    )  # int64 ids that got one token each
    plain_tokens: list[Ints] = field(default_factory=list[Ints])  # int32
    deltas: list[Delta] = field(default_factory=list[Delta])
    ended: list[Active] = field(default_factory=list[Active])
    """Requests that reached their terminal state in this commit."""
    num_context_tokens: int = 0
    num_generated: int = 0


def to_logprobs(rows: RowLogprobs) -> list[Logprobs]:
    """Chosen first, then the top K without the chosen one repeated; ranks of the top K are 1, 2, ..."""
    entries: list[Logprobs] = []
    for ids, values, rank in zip(rows.ids.tolist(), rows.values.tolist(), rows.ranks.tolist(), strict=True):
        kept = [(ids[0], values[0], rank)]
        kept += [(token, value, at + 1) for at, (token, value) in enumerate(zip(ids[1:], values[1:], strict=True))]
        if len(kept) > 1:
            kept = kept[:1] + [entry for entry in kept[1:] if entry[0] != ids[0]]
        entries.append(Logprobs([k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept]))
    return entries


def ending(active: Active, token: int, length: int, min_len: int) -> FinishReason | None:
    """Whether `token`, which makes the sequence `length` long, ends it. The device decides the same."""
    if token in active.request.stop_ids and length > min_len:
        return "stop"
    return "length" if length >= active.limit else None


def _at_fault(request: Request) -> str:
    """The caller's field that leaves no token."""
    return request.grammar.param if request.grammar is not None else "thinking_token_budget"


class Commit:
    """One section's result applied to its scheduler; lives for one call."""

    def __init__(self, section: SectionScheduler, planned: Planned, result: SectionResult, *, now_s: float) -> None:
        assert len(result.num_accepted) == planned.num_rows, "a result must answer the plan's rows"
        self.section = section
        self.planned = planned
        self.result = result
        self.now_s = now_s
        self.out = Committed()
        self._offsets: Ints = np.zeros(len(result.num_accepted) + 1, np.int32)
        np.add.accumulate(result.num_accepted, out=self._offsets[1:], dtype=np.int32)

    def run(self) -> Committed:
        row = 0
        for context in self.planned.context:
            self._commit_context(row, context)
            row += 1
        for beams in self.planned.beams:
            self._commit_beams(range(row, row + len(beams.slots)), beams)
            row += len(beams.slots)
        self._commit_generation(row)
        return self.out

    # ---- rows --------------------------------------------------------------------------------

    def _commit_context(self, row: int, context: ContextRow) -> None:
        active = context.active
        slots = self.section.slots
        slots.rows_in_flight[active.slot] -= 1
        self.out.num_context_tokens += context.count
        beam = active.request.beam is not None
        if context.samples and not beam:
            slots.pending[active.slot] -= 1
            slots.samples_in_flight[active.slot] -= 1
        if row in self.result.errors and active.finish is None:
            self._end(active, "error", error=self.result.errors[row])
        if active.finish is not None:
            self._drained(active)
            return
        prompt_logprobs = self._collect_prompt_logprobs(row, context)
        self._index(active, context.start + context.count)
        if context.samples and beam:
            self.section.beams[active.slot].commit([self.result.logprobs[row]])
            self._close_beams(active)
        elif context.samples:
            self._append(active, self._tokens(row), row, prompt_logprobs)
        elif row in self.result.hidden:
            self._pool(active, self.result.hidden[row], is_last=context.pools)
        self._drained(active)

    def _commit_beams(self, rows: range, beams: BeamRows) -> None:
        active = beams.beams.active
        self.section.slots.rows_in_flight[active.slot] -= 1
        for row in rows:
            if row in self.result.errors and active.finish is None:
                self._end(active, "error", error=self.result.errors[row])
        if active.finish is None:
            beams.beams.commit([self.result.logprobs[row] for row in rows])
            self._close_beams(active)
        self._drained(active)

    def _commit_generation(self, first: int) -> None:
        """The many: arrays for what is plain, objects for rows at an end, an edge or with extras."""
        slots, generation = self.section.slots, self.planned.generation
        if not len(generation):
            return
        settings = self.section.settings
        accepted = self.result.num_accepted[first:]
        slots.note_rows(generation, -1, num_tokens=1 + settings.draft_len)
        rich = self._rich_rows(first, accepted)
        richs: list[int] = rich.nonzero()[0].tolist()
        assert self._offsets[-1] == len(self.result.tokens)
        if settings.draft_len == 0 and len(richs) < len(rich):
            one, chosen = generation, self.result.tokens[self._offsets[first] :]
            if richs:
                plain = ~rich
                one, chosen = generation[plain], self.result.tokens[self._offsets[first:-1][plain]]
            self._settle(slots.append(one, chosen))
            self.out.num_generated += len(one)
            self.out.plain_ids.append(slots.request_id[one])
            self.out.plain_tokens.append(chosen)
        for at in richs:
            self._commit_rich(first + at, int(generation[at]))

    def _rich_rows(self, first: int, accepted: Ints) -> NDArray[np.bool_]:
        """Rows that end, are draining, accept other than one token or carry extras."""
        slots, generation = self.section.slots, self.planned.generation
        if self.section.settings.draft_len:
            return np.ones(len(generation), np.bool_)
        rich = accepted != 1
        if len(self.result.tokens) and len(slots.stop_ids):
            tokens = self.result.tokens[np.minimum(self._offsets[first:-1], len(self.result.tokens) - 1)]
            for stop_ids in slots.stop_ids:
                rich |= tokens == stop_ids[generation]
        goes_on = slots.generating & (slots.length + 1 < slots.max_len)
        rich |= ~goes_on[generation]
        for row in (*self.result.logprobs, *self.result.errors, *self.result.logits):
            if row >= first:
                rich[row - first] = True
        return rich

    def _commit_rich(self, row: int, slot: int) -> None:
        active = self.section.slots.by_slot[slot]
        assert active is not None, "a slot with rows in flight has an owner"
        if row in self.result.errors and active.finish is None:
            self._end(active, "error", error=self.result.errors[row])
        if active.finish is None:
            self._append(active, self._tokens(row), row, None)
        self._drained(active)

    # ---- requests ----------------------------------------------------------------------------

    def _tokens(self, row: int) -> list[int]:
        return self.result.tokens[self._offsets[row] : self._offsets[row + 1]].tolist()

    def _append(
        self, active: Active, tokens: list[int], row: int, prompt_logprobs: list[Logprobs | None] | None
    ) -> None:
        """Accepted tokens, up to the one that ends the request; a preempting request keeps them too."""
        slots, slot = self.section.slots, active.slot
        slots.settle(active)
        min_len = active.min_len
        finish: FinishReason | None = None
        kept = 0
        for token in tokens:
            active.tokens.append(token)
            kept += 1
            finish = ending(active, token, len(active.tokens), min_len)
            if finish is not None:
                break
        slots.length[slot] = len(active.tokens)
        self.out.num_generated += kept
        if kept == 0 and prompt_logprobs is None:
            return
        first = len(active.tokens) - kept == len(active.request.prompt)
        active.times = stamp(active.times, first_token_s=self.now_s) if first else active.times
        self._index(active, len(active.tokens) - 1)
        logprobs = to_logprobs(self.result.logprobs[row])[:kept] if row in self.result.logprobs else []
        self.out.deltas.append(
            Delta(
                id=active.request.id,
                tokens=tokens[:kept],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                cached_tokens=active.cached_tokens,
                logits=self.result.logits.get(row),
                finish=finish,
                stop_token=tokens[kept - 1] if finish == "stop" else None,
                error=self._close(active, finish) if finish else "",
                times=closed(active.times, self.now_s) if finish else active.times if first else None,
            )
        )

    def _close(self, active: Active, finish: FinishReason) -> str:
        """-> what the request should be told besides: why its prompt isn't pinned."""
        already_draining = active.draining
        active.finish = finish
        if not already_draining:
            self.section.start_draining(active)
        active.preempting = False
        self.out.ended.append(active)
        return self.section.pin(active) if active.request.pin and finish != "error" else ""

    def _pool(self, active: Active, hidden: NDArray[np.float32], *, is_last: bool) -> None:
        """Add a chunk's hidden states; a prompt whose last ones these are has its embedding."""
        active.hidden = hidden if active.hidden is None else active.hidden + hidden
        if is_last:
            num_tokens = len(active.request.prompt) if active.request.pooling == "mean" else 1
            embedding = (active.hidden / np.float32(num_tokens)).astype("<f4").tobytes()
            active.times = stamp(active.times, first_token_s=self.now_s)
            self._end(active, "stop", embedding=embedding)

    def _end(self, active: Active, finish: FinishReason, *, error: str = "", embedding: bytes = b"") -> None:
        self._close(active, finish)
        times = closed(active.times, self.now_s)
        self.out.deltas.append(
            Delta(
                id=active.request.id,
                finish=finish,
                error=error,
                param=_at_fault(active.request) if error == NO_TOKEN else "",
                times=times,
                cached_tokens=active.cached_tokens,
                embedding=embedding,
            )
        )

    def _close_beams(self, active: Active) -> None:
        if active.finish is None:
            return
        finish, active.finish = active.finish, None
        note = self._close(active, finish)
        self.out.deltas.append(
            Delta(
                id=active.request.id,
                finish=finish,
                beams=self.section.beams[active.slot].result(),
                error=note,
                times=closed(active.times, self.now_s),
                cached_tokens=active.cached_tokens,
            )
        )

    def _drained(self, active: Active) -> None:
        """A request that ended leaves with its last row; a preempted one is taken by the scheduler."""
        if active.finish is not None and self.section.slots.rows_in_flight[active.slot] == 0:
            self.section.leave(active)

    def _collect_prompt_logprobs(self, row: int, context: ContextRow) -> list[Logprobs | None] | None:
        """The whole prompt's, with the chunk that completes it."""
        active = context.active
        if active.request.sampling.prompt_logprobs < 0 or active.prompt_logprobs_done:
            return None
        if row in self.result.prompt_logprobs:
            active.prompt_logprobs.extend(to_logprobs(self.result.prompt_logprobs[row]))
        if context.start + context.count < len(active.request.prompt):
            return None
        active.prompt_logprobs_done = True
        return active.prompt_logprobs

    # ---- prefix index ------------------------------------------------------------------------

    def _index(self, active: Active, num_computed: int) -> None:
        """Blocks that are full of computed tokens become findable, those out of the window leave."""
        slots, slot = self.section.slots, active.slot
        if num_computed >= slots.commit_at[slot]:
            slots.commit_at[slot] = self._index_now(active, num_computed)

    def _index_now(self, active: Active, num_computed: int) -> int:
        """-> the computed tokens at which there is something to do again."""
        section, owner = self.section, active.request.id
        section.external.computed(active, num_computed)
        commit_at = section.kv.commit(owner, active.tokens, num_computed)
        if section.kv.has_windows and section.kv.has_left(owner):
            section.changes.changed(owner, active.slot)
        return commit_at

    def _settle(self, due: NDArray[np.int64]) -> None:
        """`_index` of many, whose owners' lists are filled up first."""
        if not len(due):
            return
        slots = self.section.slots
        filled: list[int] = due.tolist()
        lengths: list[int] = slots.length[due].tolist()
        commit_at: list[int] = slots.commit_at[due].tolist()
        for at, (slot, length) in enumerate(zip(filled, lengths, strict=True)):
            active = slots.by_slot[slot]
            assert active is not None
            slots.fill_up(active, length)
            if length > commit_at[at]:
                commit_at[at] = self._index_now(active, length - 1)
        slots.commit_at[due] = commit_at
