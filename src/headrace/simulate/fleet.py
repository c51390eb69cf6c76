"""Instances under a workload, in virtual time: events in order, each at the moment it happens."""

from __future__ import annotations

import gc
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.bench.pace import Closed, Pace, Turns
from headrace.bench.record import Record
from headrace.bench.workload import Task
from headrace.runtime.settle import settle
from headrace.simulate.instance import Instance
from headrace.simulate.model import Model
from headrace.simulate.routing import Loads, Router, round_robin
from headrace.simulate.tally import Tally
from headrace.types import Delta, Request

DUE, ENDED, TURN = range(3)
"""Kinds of events, in the order of those at one moment: a turn hears of everything that came before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    record: Record
    num_preempted: int
    busy_shares: list[float]
    """By instance: the share of the time in which its device worked."""
    num_requests: list[int]
    """By instance."""


class Fleet:
    """Instances that live through several runs, as an engine does. Nothing is random."""

    def __init__(self, model: Model, *, num_instances: int = 1, fast: bool = True) -> None:
        """fast: see `Instance`."""
        settled = settle(model.args, model.facts)
        with _no_collection():
            self.instances = [
                Instance(model, number=number, settled=settled, fast=fast) for number in range(num_instances)
            ]
        self._num_asked = 0

    def run(
        self,
        tasks: Sequence[Task],
        *,
        pace: Pace,
        router: Router = round_robin,
        cache_salt: str = "",
        progress: Callable[[int], object] | None = None,
    ) -> Outcome:
        """The whole workload; returns when the last request has ended.

        Args:
            cache_salt: runs with different salts share no cached prefix.
            progress: called with the number of requests that have ended since its last call.
        """
        start_s = max(instance.clock.now_s for instance in self.instances)
        preempted = self._num_preempted
        busy_s = [instance.engine.busy_s for instance in self.instances]
        run = Run(
            self.instances, tasks, pace=pace, router=router, first_id=self._num_asked, cache_salt=cache_salt,
            progress=progress,
        )  # fmt: skip
        self._num_asked += len(tasks)
        with _no_collection():
            record = run.play(start_s)
        duration_s = max(record.duration_s, 1e-12)
        return Outcome(
            record=record,
            num_preempted=self._num_preempted - preempted,
            busy_shares=[(each.engine.busy_s - past) / duration_s for each, past in zip(self.instances, busy_s)],
            num_requests=run.num_requests,
        )

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """One run of these on the first instance: what a scheduler learns from its steps, all of them know then."""
        if tasks:
            first, *others = self.instances
            self.run(tasks, pace=Closed(1), router=lambda request, targets, loads: 0, cache_salt="warm-up")
            for each in others:
                each.learn_from(first)

    def close(self) -> None:
        for instance in self.instances:
            instance.close()

    @property
    def _num_preempted(self) -> int:
        return sum(instance.loop.stats.totals.preempted for instance in self.instances)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A fleet has millions of objects and no garbage in cycles: to look for some would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Run:
    """One workload on its way through the instances."""

    def __init__(
        self,
        instances: Sequence[Instance],
        tasks: Sequence[Task],
        *,
        pace: Pace,
        router: Router,
        first_id: int,
        cache_salt: str,
        progress: Callable[[int], object] | None,
    ) -> None:
        self.num_requests = [0] * len(instances)
        """By instance."""
        self._instances = instances
        self._tally = Tally(len(tasks), first_id=first_id)
        self._turns = Turns(tasks, pace)
        self._router = router
        self._loads = Loads(len(instances))
        self._where: dict[int, tuple[int, Request]] = {}
        """By number of the request that has not ended: its instance."""
        self._first_id = first_id
        self._cache_salt = cache_salt
        self._events: list[tuple[float, int, int, int, object]] = []
        """A heap of (time, kind, order, instance, what)."""
        self._order = itertools.count()
        self._next_due_s: float | None = None
        self._progress = progress

    def play(self, start_s: float) -> Record:
        for instance in self._instances:
            instance.begin(self._tally)
        self._hand_over(start_s)
        while self._events:
            time_s, kind, _, at, what = heapq.heappop(self._events)
            if kind == DUE:
                self._next_due_s = None
                self._hand_over(time_s)
            elif kind == ENDED:
                assert isinstance(what, Delta)
                self._end(what, time_s)
            elif what == self._instances[at].version:
                self._turn(at)
        return self._tally.record(self._turns.tasks)

    def _turn(self, at: int) -> None:
        instance = self._instances[at]
        for time_s, delta in instance.turn():
            self._push(time_s, ENDED, at, delta)
        if instance.has_work:
            self._push(instance.next_s, TURN, at, instance.version)

    def _hand_over(self, now_s: float) -> None:
        for number, due_s in self._turns.due(now_s):
            self._tally.start_s[number] = due_s
            task = self._turns.tasks[number]
            request = task.request(self._first_id + number, arrival_s=due_s, cache_salt=self._cache_salt)
            at = self._router(request, self._instances, self._loads)
            self._loads.begin(at, request)
            self._where[number] = at, request
            self.num_requests[at] += 1
            instance = self._instances[at]
            had_work, version = instance.has_work, instance.version
            instance.put(request, now_s)
            if not had_work or instance.version != version:
                self._push(instance.next_s, TURN, at, instance.version)
        next_s = self._turns.next_s
        if next_s is not None and (self._next_due_s is None or next_s < self._next_due_s):
            self._next_due_s = next_s
            self._push(next_s, DUE, 0, None)

    def _end(self, delta: Delta, time_s: float) -> None:
        number = delta.id - self._first_id
        at, request = self._where.pop(number)
        self._loads.end(at, request)
        if self._turns.has_later_turns:
            token = self._instances[at].engine.token_of(delta.id)
            self._turns.keep(number, [token] * int(self._tally.count[number]))
        self._turns.end(number, time_s)
        if self._progress is not None:
            self._progress(1)
        self._hand_over(time_s)

    def _push(self, time_s: float, kind: int, at: int, what: object) -> None:
        heapq.heappush(self._events, (time_s, kind, next(self._order), at, what))
