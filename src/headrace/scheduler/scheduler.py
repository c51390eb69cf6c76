"""The scheduler: waiting and running requests -> a StepPlan; a StepResult -> outputs.

A request has tokens computed and tokens wanted, and a step closes the gap within the budgets.
Generation rows come first in the budget (whoever runs keeps running), then prompts under way, then
admissions. Plans may be in flight while the next is made: what they may still bring is counted as
an upper bound, and a request that ends keeps its slot and blocks until its last row is committed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.manager import KvCache
from headrace.scheduler.admission import Admission
from headrace.scheduler.commands import Commands
from headrace.scheduler.commit import Commit, Committed
from headrace.scheduler.external import Connect, no_external
from headrace.scheduler.grammars import TOO_LONG, Grammars
from headrace.scheduler.pace import Pace
from headrace.scheduler.queue import WaitingQueue
from headrace.scheduler.request import Active, Waiting, closed
from headrace.scheduler.rows import Planned
from headrace.scheduler.section import SectionScheduler
from headrace.scheduler.settings import SchedulerSettings
from headrace.seam import NO_INTS, Section, StepPlan, StepResult
from headrace.types import Delta, FinishReason, PinInfo, Request, RequestTimes

log = logging.getLogger("headrace.scheduler")

SWEEP_PERIOD_S = 0.05
NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Outbox:
    """What is to be sent: the many as arrays, the rest as deltas."""

    ids: NDArray[np.int64]
    tokens: NDArray[np.int32]
    deltas: list[Delta]

    @classmethod
    def joined(cls, ids: list[NDArray[np.int64]], tokens: list[NDArray[np.int32]], deltas: list[Delta]) -> Outbox:
        """Of each section's arrays, where it has any."""
        if not ids:
            return cls.of(deltas)
        if len(ids) == 1:
            return cls(ids[0], tokens[0], deltas)
        return cls(np.concatenate(ids), np.concatenate(tokens), deltas)

    @classmethod
    def of(cls, deltas: list[Delta]) -> Outbox:
        return cls(NO_IDS, NO_INTS, deltas)

    def __bool__(self) -> bool:
        return bool(len(self.ids) or self.deltas)


@dataclass(slots=True)
class StepCounts:
    """Of the last commit, for statistics."""

    num_context_rows: int = 0
    num_generation_rows: int = 0
    num_context_tokens: int = 0
    num_generated: int = 0
    num_ended: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    queue_latency_s: float = 0.0


@dataclass(slots=True)
class InFlight:
    step: int
    planned: list[Planned]
    counts: StepCounts = field(default_factory=StepCounts)


class Scheduler:
    """Owns every accepted request until its terminal state, which it decides (first reason wins)."""

    def __init__(
        self,
        settings: SchedulerSettings,
        caches: Sequence[KvCache],
        *,
        connect: Connect = no_external,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self.sections = [SectionScheduler(settings, kv, connect(kv, at)) for at, kv in enumerate(caches)]
        self.queue = WaitingQueue(by_priority=settings.queue_by_priority)
        self.commands = Commands()
        self._admission = Admission(settings, self.sections, self.queue, Grammars(self.queue, self.commands))
        self.counts = StepCounts()
        self._active: dict[int, tuple[Active, SectionScheduler]] = {}
        self._deadlines: dict[int, float] = {}
        """Of active requests that have one."""
        self._in_flight: deque[InFlight] = deque()
        self._deltas: list[Delta] = []
        self._step = 0
        self._next_sweep_s = 0.0
        self._planning = StepCounts()
        self.pace = Pace(settings)

    # ---- requests in, requests out -----------------------------------------------------------

    def add(self, request: Request, *, holds: dict[str, float] | None = None) -> None:
        """Accept a request; `holds` names what it waits for, with deadlines (monotonic seconds)."""
        claim = self.sections[0].kv.claim_of(request)
        order, times = self.queue.next_order(), RequestTimes(request.arrival_s)
        waiting = Waiting(request, list(request.prompt), order, claim, times=times)
        for kind, deadline_s in (holds or {}).items():
            waiting.hold(kind, deadline_s)
        refusal = self.refusal(request)
        if refusal:
            self._end_waiting(waiting, "error", refusal)
            return
        self._admission.grammars.hold(waiting, self._clock())
        self.queue.push(waiting)

    def refusal(self, request: Request) -> str:
        """Why this request could never run, with the number that fits; "" when it can."""
        settings = self.settings
        num_prompt = len(request.prompt)
        width = request.beam.width if request.beam else 1
        if num_prompt == 0:
            return "prompt: is empty; give at least one token"
        if request.beam is not None and any(group.is_recurrent for group in self.sections[0].kv.groups):
            return "beam search: this model has recurrent layers, whose states can't be forked yet; use n instead"
        most = max(section.kv.max_tokens(width=width, beside_pins=False) for section in self.sections)
        fits = min(max(section.pool_tokens(request) for section in self.sections), settings.max_seq_len)
        if num_prompt + 1 > min(most, settings.max_seq_len):
            return f"prompt: {num_prompt} tokens can never fit; at most {max(fits - 1, 0)} prompt tokens do"
        if num_prompt + 1 > fits:
            return self._beside_pins(num_prompt, fits)
        if not settings.chunked_prefill and num_prompt > settings.max_num_tokens:
            return (
                f"prompt: {num_prompt} tokens exceed max_num_tokens={settings.max_num_tokens} "
                "and chunked prefill is off; enable_chunked_prefill or shorten the prompt"
            )
        if width > min(settings.max_batch_size, settings.num_slots):
            return f"beam width {width} exceeds max_batch_size={settings.max_batch_size}"
        return ""

    def release_hold(self, request_id: int, kind: str) -> None:
        """What the request waited for (grammar, adapter, encoder, transfer) is there."""
        self.queue.release(request_id, kind)

    def abort(self, request_id: int, reason: FinishReason = "abort", error: str = "") -> None:
        """End a request from outside; unknown and already ended ids are ignored."""
        waiting = self.queue.remove(request_id)
        if waiting is not None:
            self._end_waiting(waiting, reason, error)
            return
        entry = self._active.get(request_id)
        if entry is None:
            return
        active, section = entry
        if not active.draining:
            section.start_draining(active)
        active.finish, active.preempting = reason, False
        times = closed(active.times, self._clock())
        self._deltas.append(
            Delta(id=request_id, finish=reason, error=error, times=times, cached_tokens=active.cached_tokens)
        )
        self._forget(active)
        if section.slots.rows_in_flight[active.slot] == 0:
            section.leave(active)

    def _end_waiting(self, waiting: Waiting, reason: FinishReason, error: str = "", param: str = "") -> None:
        for section in self.sections:
            # Nobody waits for its blocks on disk or in a store any more.
            section.kv.abandon(waiting.request.id)
            section.external.abandon(waiting.request.id)
            section.external.ended(waiting.request.id)
        times = closed(waiting.times, self._clock())
        self._deltas.append(Delta(id=waiting.request.id, finish=reason, error=error, param=param, times=times))
        self._log_end(waiting.request, reason, len(waiting.tokens), error)

    def _forget(self, active: Active) -> None:
        assert active.finish is not None
        del self._active[active.request.id]
        self._deadlines.pop(active.request.id, None)
        self._log_end(active.request, active.finish, len(active.tokens), "")

    @staticmethod
    def _log_end(request: Request, reason: FinishReason, length: int, error: str) -> None:
        if log.isEnabledFor(logging.INFO):
            num_prompt = len(request.prompt)
            label = request.label or request.id
            log.info("request %s ended: %s, %d + %d tokens %s", label, reason, num_prompt, length - num_prompt, error)

    @property
    def has_work(self) -> bool:
        """Something is waiting, running or in flight, copies and commands included."""
        waits = len(self.queue) or self._active or self._in_flight
        return bool(waits or self._copies_in_flight or self.commands.is_busy)

    @property
    def has_only_copies(self) -> bool:
        """No request is left, but blocks are on their way."""
        return self.has_work and not (len(self.queue) or self._active)

    @property
    def has_only_commands(self) -> bool:
        """Nothing but the end of a command (a grammar is compiled) can bring the next row."""
        others = self.queue.num_ready or self._active or self._in_flight or self._copies_in_flight
        return self.commands.is_busy and not others

    @property
    def _copies_in_flight(self) -> bool:
        return any(section.kv.copies_in_flight or section.external.is_busy for section in self.sections)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def sweep(self, now_s: float) -> None:
        """End what is past its deadline; called every loop, also when idle."""
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + SWEEP_PERIOD_S
        for waiting, kind in self.queue.overdue(now_s):
            self.queue.remove(waiting.request.id)
            if kind == "grammar" and waiting.request.grammar is not None:
                self._end_waiting(waiting, "error", TOO_LONG, waiting.request.grammar.param)
            else:
                self._end_waiting(waiting, "timeout", f"waited too long for its {kind}" if kind else "")
        for request_id in [key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s]:
            self.abort(request_id, "timeout")

    def pins(self) -> list[PinInfo]:
        """The pinned prompts, in the order they were pinned."""
        return [pin for section in self.sections for pin in section.kv.pins.infos()]

    def unpin(self, name: str) -> bool:
        """Leaves a pinned prompt to the cache's usual order; False: there is no such pin."""
        return sum(section.kv.unpin(name) for section in self.sections) > 0

    # ---- plan --------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now."""
        self.sweep(now_s)
        self._planning = StepCounts()
        for section in self.sections:
            section.kv.advance(now_s)
            for request_id in section.kv.take_arrived() + section.external.take_arrived():
                self.queue.release(request_id, "transfer")
            self._requeue_preempted(section)
        if not self.has_work:
            return None
        self._step += 1
        generations = [section.plan_generation(self._step) for section in self.sections]
        budgets = [
            self.pace.budget(len(rows) * (1 + self.settings.draft_len) + section.num_beam_rows())
            for section, rows in zip(self.sections, generations, strict=True)
        ]
        self._admit(now_s, budgets)
        contexts = [
            section.plan_context(max(budget, 0)) for section, budget in zip(self.sections, budgets, strict=True)
        ]
        num_context_rows = sum(map(len, contexts))
        num_rows = num_context_rows + sum(map(len, generations))
        num_rows += sum([section.num_beam_rows() for section in self.sections])
        if num_rows == 0 and (self._in_flight or not (self._copies_in_flight or self.commands.is_busy)):
            return None  # an empty plan is made only for commands and to hear of copies that hold blocks
        sections: list[Section] = []
        planned: list[Planned] = []
        for section, context, generation in zip(self.sections, contexts, generations, strict=True):
            built, rows = section.build(context, generation)
            sections.append(built)
            planned.append(rows)
        self._planning.num_context_rows = num_context_rows
        self._planning.num_generation_rows = num_rows - num_context_rows
        self._in_flight.append(InFlight(self._step, planned, self._planning))
        return StepPlan(self._step, tuple(sections), self.commands.take())

    def _requeue_preempted(self, section: SectionScheduler) -> None:
        for active in section.take_preempted():
            del self._active[active.request.id]
            self._deadlines.pop(active.request.id, None)
            self._planning.num_preempted += 1
            self.queue.push(
                Waiting(
                    active.request,
                    active.tokens,
                    active.order,
                    active.claim,
                    is_preempted=True,
                    times=active.times,
                    cached_tokens=active.cached_tokens,
                    prompt_logprobs_done=active.prompt_logprobs_done,
                )
            )

    def _admit(self, now_s: float, budgets: list[int]) -> None:
        for active, section in self._admission.admit(now_s, budgets):
            request = active.request
            self._active[request.id] = active, section
            if request.timeout_s is not None:
                self._deadlines[request.id] = request.arrival_s + request.timeout_s
            self._planning.num_admitted += 1
            self._planning.queue_latency_s += now_s - request.arrival_s
        self._admission.prefetch()
        outgrown, self._admission.outgrown = self._admission.outgrown, []
        for waiting in outgrown:
            self.queue.remove(waiting.request.id)
            self._end_outgrown(waiting)

    def _end_outgrown(self, waiting: Waiting) -> None:
        num_prompt = len(waiting.request.prompt)
        if len(waiting.tokens) > num_prompt:
            self._end_waiting(waiting, "length")
            return
        fits = max(section.pool_tokens(waiting.request) for section in self.sections)
        self._end_waiting(waiting, "error", self._beside_pins(num_prompt, fits))

    def _beside_pins(self, num_prompt: int, fits: int) -> str:
        """Args: fits: tokens of a whole request."""
        names = ", ".join(pin.name for pin in self.pins())
        most = max(fits - 1, 0)
        return (
            f"prompt: {num_prompt} tokens do not fit beside what is pinned, at most {most} do; unpin some of: {names}"
        )

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> Outbox:
        """Apply the oldest step in flight. Results come in the order of their plans."""
        flight = self._in_flight.popleft()
        assert flight.step == result.step, "results must come in the order of their plans"
        if len(result.failed_copies) or len(result.finished_copies):
            failed, finished = result.failed_copies.tolist(), result.finished_copies.tolist()
            for section in self.sections:
                section.kv.fail_copies(failed)
                section.kv.finish_copies(finished)
                section.external.finish(finished, failed)
        self.commands.finish(result.finished_commands)
        for failure in self._admission.grammars.take_failed():
            waiting = self.queue.remove(failure.request_id)
            if waiting is not None:
                self._end_waiting(waiting, "error", failure.error, failure.param)
        parts: list[Committed] = []
        now_s = self._clock()
        for section, planned, rows in zip(self.sections, flight.planned, result.sections, strict=True):
            part = Commit(section, planned, rows, now_s=now_s).run()
            for active in part.ended:
                self._forget(active)
            parts.append(part)
        counts = flight.counts
        counts.num_context_tokens = sum(part.num_context_tokens for part in parts)
        counts.num_generated = sum(part.num_generated for part in parts)
        self._measure(counts, result.forward_s)
        counts.num_ended = sum(len(part.ended) for part in parts)
        self.counts = counts
        self._deltas.extend(delta for part in parts for delta in part.deltas)
        ids = [array for part in parts for array in part.plain_ids]
        tokens = [array for part in parts for array in part.plain_tokens]
        return Outbox.joined(ids, tokens, self.take_deltas())

    def _measure(self, counts: StepCounts, forward_s: float) -> None:
        share = len(self.sections)
        if self.pace.note(counts.num_context_tokens / share, counts.num_generated / share, forward_s):
            for section in self.sections:
                section.kv.set_prefill_speed(self.pace.prefill_speed)

    def take_deltas(self) -> list[Delta]:
        """Deltas that no commit brings: refusals, aborts, time-outs."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def check(self) -> None:
        """Integrity of caches and slots; AssertionError names what is wrong."""
        for section in self.sections:
            section.check()
