"""The step loop: drain the inbox, plan, submit, collect, commit, send."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace import wire
from headrace.runtime.cache_map import cache_map
from headrace.runtime.stats import IterationStats, take_kv_events
from headrace.scheduler.scheduler import Outbox, Scheduler
from headrace.seam import EnginePort

IDLE_WAIT_S = 0.5
"""Longest sleep with nothing to do; an arriving message ends it."""
HELD_WAIT_S = 0.001
"""Sleep when requests wait for something else than a step (a fuller batch, blocks on their way)."""
COMMAND_WAIT_SHARE, MAX_COMMAND_WAIT_S = 0.1, 0.05
"""Only an empty plan hears of a command's end: it is asked for after a tenth more of the time that it has taken."""
SLOW_STEP_S = 0.1
"""A forward pass beside which the time between two steps doesn't matter."""
REST_S = 2.0
"""Longest that the end waits for copies under way."""
BEAT_PERIOD_S = 1.0
"""Longest silence while steps are made: by it front ends tell a long prompt from a stuck engine."""


class Link(Protocol):
    """Where messages of front ends come from and outputs go to."""

    def receive(self, wait_s: float) -> Sequence[wire.Up]:
        """Messages that are there; waits up to `wait_s` for a first one."""
        ...

    def send(self, outbox: Outbox, step: int) -> None:
        """Route tokens and deltas to the front ends that own them; an empty outbox is a sign of life for all."""
        ...

    def reply(self, message: wire.Down) -> None:
        """Answer the front end whose message `receive` gave last."""
        ...


class Loop:
    """One runtime: a scheduler, an engine and the link to the front ends.

    Overlap is the same loop with more plans in flight: with `depth` 1 the next plan is made and
    submitted before the last result is collected.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: EnginePort,
        link: Link,
        stats: IterationStats,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.scheduler = scheduler
        self.engine = engine
        self.link = link
        self.stats = stats
        self.steps = 0
        self._stopping = False
        self._is_slow = False
        self._sent_s = 0.0
        self._command_since_s: float | None = None
        """Since when nothing but a command's end can bring a step."""

    def run(self) -> None:
        """Until a Shutdown message; raises what the engine raises."""
        while not self._stopping:
            self.turn()
        self._come_to_rest()

    def stop(self) -> None:
        """As a Shutdown message does; from any thread."""
        self._stopping = True

    def turn(self) -> None:
        self._drain()
        self.step()

    def _come_to_rest(self) -> None:
        """Copies under way end, and what is worth keeping goes to disk, if that is soon done."""
        deadline_s = self._clock() + REST_S
        while self.scheduler.has_only_copies and self._clock() < deadline_s:
            self.step()

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan(self._clock())
        if deltas := scheduler.take_deltas():
            self._send(Outbox.of(deltas))
        if plan is not None:
            self.engine.submit(plan)
        most = self._num_ahead if plan is not None else max(scheduler.num_in_flight - 1, 0)
        while scheduler.num_in_flight > most:
            result = self.engine.collect()
            outbox = scheduler.commit(result)
            self.steps += 1
            self._is_slow = result.forward_s > SLOW_STEP_S
            self.stats.record(scheduler, result)
            self._send(outbox, is_step=True)

    @property
    def _num_ahead(self) -> int:
        """Steps that may be in flight beside the one waited for. Where steps are bounded in time and long still,
        as on a CPU, what a next one would gain is nothing beside what waits for it: cancels, and new requests."""
        settings = self.scheduler.settings
        return 0 if self._is_slow and settings.max_step_s > 0 else settings.depth

    def _send(self, outbox: Outbox, *, is_step: bool = False) -> None:
        now_s = self._clock()
        if outbox or (is_step and now_s - self._sent_s >= BEAT_PERIOD_S):
            self.link.send(outbox, self.steps)
            self._sent_s = now_s

    def _drain(self) -> None:
        for message in self.link.receive(self._patience()):
            self._handle(message)

    def _patience(self) -> float:
        """How long the inbox may be waited for: not at all while steps can be made."""
        scheduler = self.scheduler
        if scheduler.num_in_flight:
            return 0.0
        if not scheduler.has_only_commands:
            self._command_since_s = None
            return (0.0 if scheduler.num_active else HELD_WAIT_S) if scheduler.has_work else IDLE_WAIT_S
        now_s = self._clock()
        self._command_since_s = self._command_since_s or now_s
        return min(max(HELD_WAIT_S, COMMAND_WAIT_SHARE * (now_s - self._command_since_s)), MAX_COMMAND_WAIT_S)

    def _handle(self, message: wire.Up) -> None:
        match message:
            case wire.Submit(requests):
                for request in requests:
                    self.scheduler.add(request)
            case wire.Abort(ids, reason):
                for request_id in ids:
                    self.scheduler.abort(request_id, reason)
            case wire.GetStats(drain):
                records = self.stats.take() if drain else [self.stats.current(self.scheduler)]
                self.link.reply(wire.Stats(records))
            case wire.GetMetrics():
                self.link.reply(self.stats.totals.snapshot(self.scheduler))
            case wire.Profile():
                self.link.reply(self._profile(message))
            case wire.GetKvEvents():
                self.link.reply(wire.KvEvents(take_kv_events(self.scheduler)))
            case wire.GetPins(call):
                self.link.reply(wire.Pins(call, self.scheduler.pins()))
            case wire.Unpin(call, name):
                found = self.scheduler.unpin(name)
                self.link.reply(wire.Pins(call, self.scheduler.pins(), found))
            case wire.GetCacheMap():
                self.link.reply(cache_map(self.scheduler, message))
            case wire.Shutdown():
                self._stopping = True
            case wire.Hello():
                pass  # the link knows its front ends

    def _profile(self, wanted: wire.Profile) -> wire.Profiled:
        """Steps go on until the engine has done it."""
        args = {
            "label": time.strftime("%Y%m%d-%H%M%S"),
            "num_steps": wanted.num_steps,
            "start_step": wanted.start_step,
            "activities": wanted.activities,
        }
        done: list[dict[str, Any]] = []
        self.scheduler.commands.begin("start_profile" if wanted.start else "stop_profile", args, done.append)
        while not done:
            self.step()
        return wire.Profiled(**done[0])
