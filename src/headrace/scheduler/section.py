"""One data-parallel section: its active requests, its KV cache, its part of every plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.manager import KvCache
from headrace.scheduler import capacity, chunking
from headrace.scheduler.beam import BeamRows, Beams, beam_init
from headrace.scheduler.request import Active, Waiting, stamp
from headrace.scheduler.settings import SchedulerSettings
from headrace.scheduler.slots import SlotTable
from headrace.types import Request
from headrace.seam import FROM_DEVICE, HOST_TOKEN, PROMPT_LOGPROBS, SAMPLE, Ints, Section, SlotInit, ints


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

    context: list[ContextRow] = field(default_factory=list)
    beams: list[BeamRows] = field(default_factory=list)
    generation: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Slots of the generation rows; each slot keeps its owner while it has rows in flight."""

    @property
    def num_rows(self) -> int:
        return len(self.context) + sum(len(rows.slots) for rows in self.beams) + len(self.generation)


class SectionScheduler:
    """Plans one section. The facade (`Scheduler`) owns the queue and the terminal states."""

    def __init__(self, settings: SchedulerSettings, kv: KvCache, *, index: int, num_sections: int) -> None:
        self.settings = settings
        self.kv = kv
        self.slots = SlotTable(settings.num_slots)
        self.policy = capacity.POLICIES[settings.capacity_policy]()
        self.prefilling: dict[int, Active] = {}
        """By slot, in admission order: requests whose known tokens are not planned through yet."""
        self.beams: dict[int, Beams] = {}
        """By the slot of the request that was admitted."""
        self._num_sections = num_sections
        self._promised = 0
        self.num_active = 0
        """Requests that go on, beams counted; draining ones hold a slot but are not counted."""
        self._preempting: list[Active] = []
        self._freed: list[int] = []
        self._inits: list[SlotInit] = []
        self._copies: list[tuple[int, int, int, int, int, int]] = []
        self._next_copy_id = index  # sections count in strides, so that ids are unique
        self._next_beam_owner = -1
        self._grown: dict[int, int] = {}
        """Owners whose table gained blocks since the last plan -> their slot."""
        self._copy_leases: dict[int, tuple[int, int, int]] = {}
        self.num_usable_blocks = min(pool.num_total for pool in kv.pools)

    # ---- admission ---------------------------------------------------------------------------

    def limit_of(self, request: Request) -> int:
        """Where the request must end: its own limit, the model's, or the pool's if it were alone."""
        return min(len(request.prompt) + request.max_tokens, self.settings.max_seq_len, self.pool_tokens(request))

    def pool_tokens(self, request: Request) -> int:
        """Tokens that one sequence of the request may have when nobody else is there."""
        blocks = self.num_usable_blocks
        if request.beam is not None:  # each beam its own blocks, and one for the copy at a fork
            blocks = blocks // request.beam.width - 1
        return max(blocks, 0) * self.settings.tokens_per_block

    def can_admit(self, waiting: Waiting) -> bool:
        width = waiting.request.beam.width if waiting.request.beam else 1
        if self.slots.num_free < width or self.num_active + width > self.settings.max_batch_size:
            return False
        return self.policy.can_admit(
            self.kv,
            waiting,
            limit=self.limit_of(waiting.request),
            width=width,
            promised_blocks=self._promised,
            reuse=self.may_reuse(waiting),
        )

    def may_reuse(self, waiting: Waiting) -> bool:
        """Log-probabilities of the prompt need every position computed."""
        return self.settings.reuse and waiting.request.sampling.prompt_logprobs < 0

    def open_admission(self) -> None:
        """Count once a step what active requests may still take; `admit` adds to it."""
        self._promised = self.promised_blocks()

    def admit(self, waiting: Waiting, now_s: float) -> Active:
        request = waiting.request
        cached = self.kv.admit(
            request.id, waiting.tokens, salt=request.cache_salt, reuse=self.may_reuse(waiting)
        )
        active = Active(
            request=request,
            tokens=waiting.tokens,
            slot=-1,
            order=waiting.order,
            planned=cached,
            times=stamp(waiting.times, first_scheduled_s=now_s),
            cached_tokens=waiting.cached_tokens if waiting.cached_tokens >= 0 else cached,
            limit=self.limit_of(request),
            prompt_logprobs_done=waiting.prompt_logprobs_done,
        )
        min_len = len(request.prompt) + request.min_tokens
        slot = self.slots.take(active, min_len=min_len)
        self.slots.capacity[slot] = self.kv.num_tokens_capacity(request.id)
        self.slots.indexed[slot] = cached // self.settings.tokens_per_block
        self._inits.append(self._slot_init(active, slot, min_len))
        self.prefilling[slot] = active
        self.num_active += 1
        self.note_grown(request.id, slot)
        if request.beam is not None:
            self.slots.max_len[slot] = 0  # its blocks are promised by `Beams`, it never generates by itself
            self.beams[slot] = Beams(active, self)
            self.num_active += request.beam.width - 1
            self._promised += self.beams[slot].promised_blocks()
        elif not self.policy.may_preempt:
            self._promised += self.kv.blocks_needed(active.limit) - cached // self.settings.tokens_per_block
        return active

    def _slot_init(self, active: Active, slot: int, min_len: int) -> SlotInit:
        request = active.request
        sampling = request.sampling
        if request.beam is not None:
            return beam_init(active, slot)
        history = ints(active.tokens) if sampling.needs_history else None
        return SlotInit(
            slot, request.id, sampling, len(request.prompt), min_len, active.limit, request.stop_ids, history
        )

    def promised_blocks(self) -> int:
        """Blocks that active requests may still take and that nobody else may have."""
        promised = self._promised_to_beams()
        if not self.policy.may_preempt:
            block = self.settings.tokens_per_block
            left = -(-self.slots.max_len // block) - self.slots.capacity // block
            promised += int(np.maximum(left, 0).sum())
        return promised

    def _promised_to_beams(self) -> int:
        return sum(beams.promised_blocks() for beams in self.beams.values())

    # ---- planning ----------------------------------------------------------------------------

    def plan_generation(self, step: int) -> NDArray[np.int64]:
        """Slots that get a generation row: within the budget, with room for the tokens they may add."""
        slots = self.slots
        rows = slots.may_generate(chained=self.settings.chained)
        if not self.settings.chained and len(rows):
            # Pipeline stages: spread the requests over the plans in flight instead of one fat plan.
            share = -(-int(np.count_nonzero(slots.generating)) // (self.settings.depth + 1))
            rows = self._longest_idle(rows, share)
        rows = self._longest_idle(rows, self.settings.max_num_tokens // (1 + self.settings.draft_len))
        needed = slots.length[rows] + slots.pending[rows] + self.settings.draft_len
        short = rows[np.minimum(needed, slots.max_len[rows]) > slots.capacity[rows]]
        stalled = [slot for slot in self._by_order(short) if not self._grow(slot)]
        # A victim of this very loop has left `generating`; a stalled slot waits for the next plan.
        rows = rows[slots.generating[rows]]
        if stalled:
            rows = rows[~np.isin(rows, stalled)]
        slots.last_step[rows] = step
        return rows

    def _longest_idle(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        if len(rows) <= count:
            return rows
        order = np.argsort(self.slots.last_step[rows], kind="stable")[:count]
        return np.sort(rows[order])

    def _by_order(self, rows: NDArray[np.int64]) -> list[int]:
        def order(slot: int) -> int:
            active = self.slots.by_slot[slot]
            assert active is not None
            return active.order

        return sorted(rows.tolist(), key=order)

    def _grow(self, slot: int) -> bool:
        """Blocks for everything a row of this slot may add now; may preempt someone younger."""
        active = self.slots.by_slot[slot]
        assert active is not None
        if active.draining:
            return False
        slots = self.slots
        needed = int(min(slots.length[slot] + slots.pending[slot] + self.settings.draft_len, slots.max_len[slot]))
        return self.ensure(active, needed)

    def ensure(self, active: Active, num_tokens: int) -> bool:
        """Room for `num_tokens`. False: not now; a victim may have been asked to leave."""
        slot = active.slot
        if num_tokens <= self.slots.capacity[slot]:
            return True
        owner = active.request.id
        spare = self.kv.num_available()
        if self.policy.may_preempt and active.request.beam is None:
            spare -= self._promised_to_beams()
        if self.kv.missing_blocks(owner, num_tokens) <= spare and self.kv.extend(owner, num_tokens):
            self.slots.capacity[slot] = self.kv.num_tokens_capacity(owner)
            self.note_grown(owner, slot)
            return True
        assert self.policy.may_preempt, "a promise of blocks was broken"
        victim = capacity.pick_victim(self.slots.actives())
        if victim is not None and not self._preempting:
            self.start_preempting(victim)
        return False

    def start_preempting(self, active: Active) -> None:
        active.preempting = True
        self._preempting.append(active)
        self.start_draining(active)

    def num_beam_rows(self) -> int:
        return sum(beams.num_rows_wanted for beams in self.beams.values())

    @property
    def context_left(self) -> int:
        return sum(active.context_left for active in self.prefilling.values())

    def plan_context(self, budget: int) -> list[ContextRow]:
        """Chunks of prompts (and of what preempted requests had generated) within the budget."""
        settings = self.settings
        policy = (
            chunking.POLICIES[settings.chunking_policy] if settings.chunked_prefill else chunking.whole_prompts
        )
        actives = list(self.prefilling.values())
        chunks = policy([active.context_left for active in actives], budget, settings.tokens_per_block)
        rows: list[ContextRow] = []
        for active, count in zip(actives, chunks, strict=True):
            if count == 0 or active.draining:
                continue
            if not self.ensure(active, min(active.planned + count, active.limit)):
                continue
            rows.append(ContextRow(active, active.planned, count, count == active.context_left))
        return rows

    def build(self, context: list[ContextRow], generation: NDArray[np.int64]) -> tuple[Section, Planned]:
        """The rows' arrays, and the bookkeeping of what is now in flight."""
        beams = [rows for group in list(self.beams.values()) if (rows := group.plan()) is not None]
        planned = Planned(context=context, beams=beams, generation=generation)
        rows = _Rows()
        for row in context:
            rows.add_context(row)
        for group in beams:
            rows.add_beams(group)
        section = rows.section(generation, 1 + self.settings.draft_len)
        for row in context:
            self._note_context(row)
        self.slots.pending[generation] += 1 + self.settings.draft_len
        self.slots.rows_in_flight[generation] += 1
        self.slots.samples_in_flight[generation] += 1
        return self._with_changes(section), planned

    def _note_context(self, row: ContextRow) -> None:
        active = row.active
        slot = active.slot
        active.planned += row.count
        self.slots.rows_in_flight[slot] += 1
        if not row.samples:
            return
        self.prefilling.pop(slot, None)
        if active.request.beam is None:
            self.slots.pending[slot] += 1
            self.slots.samples_in_flight[slot] += 1
            # Planning a later chunk may have chosen this very request as the victim.
            self.slots.generating[slot] = not active.draining

    def _with_changes(self, section: Section) -> Section:
        changed = Section(
            section.slot,
            section.num_tokens,
            section.start,
            section.num_drafts,
            section.tree,
            section.flags,
            section.num_context_rows,
            section.ids,
            section.next_ids,
            self._new_blocks(),
            ints(self._freed),
            tuple(self._inits),
            ints(self._copies).reshape(len(self._copies), 6),
        )
        self._freed, self._inits, self._copies = [], [], []
        return changed

    def _new_blocks(self) -> tuple[Ints, ...]:
        """Blocks that tables gained since the last plan, as (slot, index, block) by group."""
        triples: list[list[tuple[int, int, int]]] = [[] for _ in self.kv.groups]
        for owner, slot in self._grown.items():
            for group, blocks in enumerate(self.kv.take_new_blocks(owner)):
                triples[group].extend((slot, index, block) for index, block in blocks)
        self._grown = {}
        return tuple(ints(group).reshape(len(group), 3) for group in triples)

    def note_grown(self, owner: int, slot: int) -> None:
        self._grown[owner] = slot

    def forget_grown(self, owner: int) -> None:
        self._grown.pop(owner, None)

    # ---- beams and copies --------------------------------------------------------------------

    def take_beam_slots(self, active: Active, count: int) -> list[tuple[int, int]]:
        """Further slots and owners for the beams of `active`, as (slot, owner)."""
        taken: list[tuple[int, int]] = []
        for _ in range(count):
            slot = self.slots.take_bare(active)
            self._inits.append(beam_init(active, slot))
            taken.append((slot, self._next_beam_owner))
            self._next_beam_owner -= 1
        return taken

    def fork(self, parent: int, child: int, slot: int, num_tokens: int) -> None:
        """`child` shares the parent's blocks; the copy of the partial one goes out with the next plan.

        Leased here and not when planned: the search may be aborted before that.
        """
        self._copies.extend(self._lease_copy(*copy) for copy in self.kv.fork(parent, child, num_tokens))
        self.note_grown(child, slot)

    def _lease_copy(self, group: int, source: int, destination: int) -> tuple[int, int, int, int, int, int]:
        """Both ends stay leased until the engine reports the copy done."""
        copy_id = self._next_copy_id
        self._next_copy_id += self._num_sections
        self.kv.lease(group, source)
        self.kv.lease(group, destination)
        self._copy_leases[copy_id] = (group, source, destination)
        return copy_id, group, 0, source, 0, destination

    @property
    def copies_in_flight(self) -> bool:
        return bool(self._copy_leases)

    def own_copies(self, copy_ids: list[int]) -> list[int]:
        return [copy_id for copy_id in copy_ids if copy_id in self._copy_leases]

    def finish_copies(self, copy_ids: Iterable[int]) -> None:
        for copy_id in copy_ids:
            group, source, destination = self._copy_leases.pop(copy_id)
            self.kv.unlease(group, source)
            self.kv.unlease(group, destination)

    # ---- leaving -----------------------------------------------------------------------------

    def start_draining(self, active: Active) -> None:
        """No further rows; others may count on its place already."""
        self.slots.generating[active.slot] = False
        self.prefilling.pop(active.slot, None)
        self.num_active -= active.request.beam.width if active.request.beam else 1

    def take_preempted(self) -> list[Active]:
        """Preempted requests whose rows are all committed, out of their slots."""
        if not self._preempting:
            return []
        out = [a for a in self._preempting if a.preempting and self.slots.rows_in_flight[a.slot] == 0]
        self._preempting = [a for a in self._preempting if a.preempting and a not in out]
        for active in out:
            self.leave(active)
        return out

    def leave(self, active: Active) -> None:
        """The last row of a draining request is committed: its slot and blocks are free."""
        slot = active.slot
        assert active.draining and self.slots.rows_in_flight[slot] == 0
        beams = self.beams.pop(slot, None)
        if beams is not None:
            beams.release()
            freed = beams.slots()
        else:
            self.kv.release(active.request.id)
            self.forget_grown(active.request.id)
            freed = [slot]
        for each in freed:
            self.slots.give_back(each)
        self._freed.extend(freed)


    def check(self) -> None:
        """Blocks add up, every slot has one owner, counters are not negative."""
        self.kv.check()
        slots = self.slots
        used = sum(owner is not None for owner in slots.by_slot)
        assert used + slots.num_free == len(slots.by_slot), "slots lost"
        for array in (slots.pending, slots.rows_in_flight, slots.samples_in_flight):
            assert (array >= 0).all(), "a counter of rows in flight is negative"
        going_on = sum(a.request.beam.width if a.request.beam else 1 for a in slots.actives() if not a.draining)
        assert going_on == self.num_active, f"num_active is {self.num_active}, {going_on} requests go on"


class _Rows:
    """The arrays of a section, row by row for what carries host ids."""

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
        """With the generation rows behind the rows that carry ids."""
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
