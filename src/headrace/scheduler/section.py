"""One data-parallel section: its active requests, its KV cache, its part of every plan."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.manager import KvCache
from headrace.scheduler import capacity, chunking
from headrace.scheduler.beam import Beams, beam_init
from headrace.scheduler.changes import Changes
from headrace.scheduler.external import NoExternal
from headrace.scheduler.request import Active, Waiting, stamp
from headrace.scheduler.rows import ContextRow, Planned, RowArrays
from headrace.scheduler.settings import SchedulerSettings
from headrace.scheduler.slots import SlotTable
from headrace.seam import Section, SlotInit, ints
from headrace.types import Request

log = logging.getLogger("headrace.scheduler")


class SectionScheduler:
    """Plans one section. The facade (`Scheduler`) owns the queue and the terminal states."""

    def __init__(self, settings: SchedulerSettings, kv: KvCache, external: NoExternal) -> None:
        self.settings = settings
        self.kv = kv
        self.external = external
        self.slots = SlotTable(settings.num_slots)
        self.policy = capacity.POLICIES[settings.capacity_policy]()
        self.prefilling: dict[int, Active] = {}
        """By slot, in admission order: requests whose known tokens are not planned through yet."""
        self.beams: dict[int, Beams] = {}
        """By the slot of the request that was admitted."""
        self.num_active = 0
        """Requests that go on, beams counted; draining ones hold a slot but are not counted."""
        self.changes = Changes(kv, external)
        self._preempting: list[Active] = []
        self._next_beam_owner = -1

    # ---- admission ---------------------------------------------------------------------------

    def limit_of(self, request: Request, *, sequence_fits: int = 0) -> int:
        """Where the request must end: its own limit, the model's, or the pool's if it were alone with the pins.

        `sequence_fits`: what `kv.max_tokens()` says now, for who asks for many requests.
        """
        fits = sequence_fits if sequence_fits and request.beam is None else self.pool_tokens(request)
        return min(len(request.prompt) + request.max_tokens, self.settings.max_seq_len, fits)

    def pool_tokens(self, request: Request) -> int:
        """Tokens that one sequence of the request may have when nobody but pins is there."""
        return self.kv.max_tokens(width=request.beam.width if request.beam else 1)

    def can_admit(self, waiting: Waiting, limit: int) -> bool:
        """`limit` as of `limit_of`."""
        width = waiting.request.beam.width if waiting.request.beam else 1
        if self.slots.num_free < width or self.num_active + width > self.settings.max_batch_size:
            return False
        if waiting.is_preempted and self.num_active and not self.kv.may_resume():
            return False
        if len(waiting.tokens) >= limit:  # beside the pins of this section
            return False
        return self.policy.can_admit(self.kv, waiting, limit=limit, width=width, reuse=self.may_reuse(waiting))

    def may_reuse(self, waiting: Waiting) -> bool:
        """Log-probabilities of the prompt need every position computed, and so does a mean."""
        request = waiting.request
        return self.settings.reuse and request.sampling.prompt_logprobs < 0 and not request.pooling

    def fetch(self, waiting: Waiting) -> bool:
        """Whether the request waits for blocks on disk or in a store, which are brought from now on."""
        if waiting.is_fetched or not self.may_reuse(waiting):
            return False
        found = self.kv.fetch(waiting.request.id, waiting.tokens, waiting.claim)
        waiting.is_fetched = found or not self.kv.is_fetch_full
        return found or self.external.fetch(waiting)

    def open_admission(self) -> None:
        """Count what beams may still take at worst; other requests are counted by the cache."""
        self.kv.set_aside(self._promised_to_beams())

    def admit(self, waiting: Waiting, limit: int, now_s: float) -> Active:
        request = waiting.request
        promised = min(limit, len(waiting.tokens) + 1) if self.policy.may_preempt else limit
        cached = self.kv.admit(
            request.id,
            waiting.tokens,
            claim=waiting.claim,
            reuse=self.may_reuse(waiting),
            limit=promised if request.beam is None else 0,
            grows=self.policy.may_preempt,
            slides=request.beam is None,
        )
        active = Active(
            request=request,
            tokens=waiting.tokens,
            claim=waiting.claim,
            num_known=len(waiting.tokens),
            slot=-1,
            order=waiting.order,
            planned=cached,
            times=stamp(waiting.times, first_scheduled_s=now_s),
            cached_tokens=waiting.cached_tokens if waiting.cached_tokens >= 0 else cached,
            limit=limit,
            prompt_logprobs_done=waiting.prompt_logprobs_done,
        )
        slot = self.slots.take(
            active,
            capacity=self.kv.num_tokens_capacity(request.id),
            commit_at=self.kv.commit_at(request.id),
        )
        self.kv.begin(request.id, slot)
        self.changes.begin(self._slot_init(active, slot))
        self.prefilling[slot] = active
        self.num_active += 1
        self.changes.changed(request.id, slot)
        if request.beam is not None:
            self.slots.max_len[slot] = 0  # its blocks are promised by `Beams`, it never generates by itself
            self.beams[slot] = Beams(active, self)
            self.num_active += request.beam.width - 1
            self.open_admission()
        return active

    def _slot_init(self, active: Active, slot: int) -> SlotInit:
        request = active.request
        sampling = request.sampling
        if request.beam is not None:
            return beam_init(active, slot)
        is_followed = sampling.needs_history or request.grammar is not None or request.thinking is not None
        return SlotInit(
            slot=slot,
            request_id=request.id,
            sampling=sampling,
            prompt_len=len(request.prompt),
            min_len=active.min_len,
            max_len=active.limit,
            stop_ids=request.stop_ids,
            history=ints(active.tokens) if is_followed else None,
            grammar=request.grammar,
            thinking=request.thinking,
        )

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
        needed = np.minimum(slots.length + slots.pending + self.settings.draft_len, slots.max_len)
        short = rows[(needed > slots.capacity)[rows]]
        stalled = self.make_room(short, needed[short]) if len(short) else ()
        if stalled:  # they wait for the next plan, and a victim of `_grow` has left `generating`
            rows = rows[slots.generating[rows]]
            rows = rows[~np.isin(rows, list(stalled))]
        slots.last_step[rows] = step
        return rows

    def _longest_idle(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        if len(rows) <= count:
            return rows
        order = np.argsort(self.slots.last_step[rows], kind="stable")[:count]
        return np.sort(rows[order])

    def make_room(self, slots: NDArray[np.int64], needed: NDArray[np.int64]) -> set[int]:
        """Blocks for as many tokens each, for those that arrived first before others; returns the slots without."""
        return self._grow(self._by_order(slots, needed))

    def _by_order(self, rows: NDArray[np.int64], needed: NDArray[np.int64]) -> list[tuple[Active, int]]:
        """The slots' owners, each with the tokens that it needs room for, as they arrived."""
        by_slot = self.slots.by_slot
        slots: list[int] = rows.tolist()
        counts: list[int] = needed.tolist()
        wants = [
            (active, num_tokens)
            for slot, num_tokens in zip(slots, counts, strict=True)
            if (active := by_slot[slot]) is not None
        ]
        return sorted(wants, key=lambda want: want[0].order)

    def _grow(self, wants: list[tuple[Active, int]]) -> set[int]:
        """Room for as many tokens each, in turn; returns the slots that have none, and then asks a victim to leave."""
        if not wants:
            return set()
        headroom = self._promised_to_beams() if self.policy.may_preempt else 0
        refused = self.kv.extend_each(
            [
                (active.request.id, num_tokens, 0 if active.request.beam is not None else headroom)
                for active, num_tokens in wants
            ]
        )
        owners, slots = [active.request.id for active, _ in wants], [active.slot for active, _ in wants]
        self.slots.capacity[slots] = [self.kv.num_tokens_capacity(owner) for owner in owners]
        self.changes.changed_each(owners, slots)
        if not refused:
            return set()
        self._make_way()
        return {slot for owner, slot in zip(owners, slots, strict=True) if owner in refused}

    def _make_way(self) -> None:
        """Somebody got no blocks: the request that arrived last leaves, one at a time."""
        assert self.policy.may_preempt, "a promise of blocks was broken"
        victim = capacity.pick_victim(self.slots.actives())
        if victim is not None and not self._preempting:
            self.start_preempting(victim)

    def start_preempting(self, active: Active) -> None:
        active.preempting = True
        self._preempting.append(active)
        self.start_draining(active)

    def num_beam_rows(self) -> int:
        return sum(beams.num_rows_wanted for beams in self.beams.values()) if self.beams else 0

    @property
    def context_wanted(self) -> int:
        """Budget that prompts under way take before a new one is served."""
        return sum(self.share_of(active.context_left) for active in self.prefilling.values())

    def share_of(self, context_left: int) -> int:
        settings = self.settings
        policy = settings.chunking_policy if settings.chunked_prefill else "FIRST_COME_FIRST_SERVED"
        return chunking.least_share(policy, context_left, settings.tokens_per_block)

    def plan_context(self, budget: int) -> list[ContextRow]:
        """Chunks of prompts (and of what preempted requests had generated) within the budget."""
        if not self.prefilling:
            return []
        settings = self.settings
        policy = chunking.POLICIES[settings.chunking_policy] if settings.chunked_prefill else chunking.whole_prompts
        actives = list(self.prefilling.values())
        left = [self.kv.next_stop(active.request.id, active.planned) - active.planned for active in actives]
        left = [min(*lengths) for lengths in zip(left, [active.context_left for active in actives], strict=True)]
        chunks = policy(left, budget, settings.tokens_per_block)
        wants = [
            (active, min(active.planned + n, active.limit)) for active, n in zip(actives, chunks, strict=True) if n
        ]
        stalled = self._grow(wants)
        rows: list[ContextRow] = []
        for active, count in zip(actives, chunks, strict=True):
            if count == 0 or active.draining or active.slot in stalled:
                continue
            samples = count == active.context_left and not active.request.pooling
            rows.append(ContextRow(active, active.planned, count, samples))
            self.kv.save(active.request.id, active.planned + count, active.slot)
        return rows

    def build(self, context: list[ContextRow], generation: NDArray[np.int64]) -> tuple[Section, Planned]:
        """The rows' arrays, and the bookkeeping of what is now in flight."""
        beams = [rows for group in list(self.beams.values()) if (rows := group.plan()) is not None]
        planned = Planned(context=context, beams=beams, generation=generation)
        rows = RowArrays()
        for row in context:
            rows.add_context(row)
        for group in beams:
            rows.add_beams(group)
        section = rows.section(generation, 1 + self.settings.draft_len, self.changes)
        for row in context:
            self._note_context(row)
        if len(generation):
            self.slots.note_rows(generation, 1, num_tokens=1 + self.settings.draft_len)
        return section, planned

    def _note_context(self, row: ContextRow) -> None:
        active = row.active
        slot = active.slot
        active.planned += row.count
        self.slots.rows_in_flight[slot] += 1
        if row.samples or row.pools:
            self.prefilling.pop(slot, None)
        if not row.samples:
            return
        if active.request.beam is None:
            self.slots.pending[slot] += 1
            self.slots.samples_in_flight[slot] += 1
            # Planning a later chunk may have chosen this very request as the victim.
            self.slots.generating[slot] = not active.draining

    # ---- beams --------------------------------------------------------------------

    def take_beam_slots(self, active: Active, count: int) -> list[tuple[int, int]]:
        """Further slots and owners for the beams of `active`, as (slot, owner)."""
        taken: list[tuple[int, int]] = []
        for _ in range(count):
            slot = self.slots.take_bare(active)
            self.changes.begin(beam_init(active, slot))
            taken.append((slot, self._next_beam_owner))
            self._next_beam_owner -= 1
        return taken

    def fork(self, parent: int, child: int, slot: int, num_tokens: int) -> None:
        """`child` shares the parent's blocks; the copy of the partial one goes out with the next plan."""
        for group, source, destination in self.kv.fork(parent, child, num_tokens):
            self.kv.copy(group, source, destination)
        self.changes.changed(child, slot)

    def drop_beam(self, owner: int) -> None:
        """A beam is not continued, or its search has ended."""
        self.kv.release(owner)
        self.changes.forget(owner)

    # ---- leaving -----------------------------------------------------------------------------

    def start_draining(self, active: Active) -> None:
        """No further rows; others may count on its place already."""
        self.slots.settle(active)
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
            self._release(active)
            freed = [slot]
        for each in freed:
            self.slots.give_back(each)
        self.changes.free(freed)

    def _release(self, active: Active) -> None:
        """What was computed stays findable; of a request that ended, as its reuse policy says."""
        owner = active.request.id
        if active.finish is not None:
            self.external.left(active)
        whole = active.finish in (None, "stop", "length")  # what an aborted one computed last is not worth telling
        self.kv.release(
            owner,
            index=active.finish != "error" and not active.request.pooling,
            tokens=active.tokens,
            num_computed=active.num_computed if whole else 0,
            final=active.finish is not None,
        )
        self.changes.forget(owner)

    def pin(self, active: Active) -> str:
        """Keeps the prompt's blocks under the request's name for them; returns why not, or ""."""
        longest = max((other.limit for other in self.slots.actives() if not other.draining), default=0)
        request = active.request
        refusal = self.kv.pin(request.pin, active.tokens, active.claim, longest=longest)
        if refusal:
            log.warning("request %s: %r is not pinned: %s", request.label or request.id, request.pin, refusal)
            return refusal
        left, whole = self.kv.max_tokens(), min(self.kv.max_tokens(beside_pins=False), self.settings.max_seq_len)
        if left < whole:
            log.warning(
                "%r is pinned: beside what is pinned a request has room for %d tokens and not for %d; unpin some, or"
                " start with a larger cache",
                request.pin,
                left,
                whole,
            )
        return ""

    def check(self) -> None:
        """Blocks add up, every slot has one owner, counters are not negative."""
        self.kv.check()
        slots = self.slots
        used = sum(owner is not None for owner in slots.by_slot)
        assert used + slots.num_free == len(slots.by_slot), "slots lost"
        for array in (slots.pending, slots.rows_in_flight, slots.samples_in_flight):
            assert (array >= 0).all(), "a counter of rows in flight is negative"
            assert not array[slots.free].any(), "a free slot has rows in flight"
        going_on = sum(a.request.beam.width if a.request.beam else 1 for a in slots.actives() if not a.draining)
        assert going_on == self.num_active, f"num_active is {self.num_active}, {going_on} requests go on"
