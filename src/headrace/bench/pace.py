"""When each request is handed over: closed loops, Poisson and constant arrivals, a trace's own times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.bench.workload import Task

__all__ = ["Closed", "Open", "Pace", "Turns", "constant_arrivals", "poisson_arrivals", "trace_arrivals"]


@dataclass(frozen=True, slots=True)
class Closed:
    """A request begins when another one ends."""

    concurrency: int | None = None
    """Most requests handed over and not yet ended; None is no limit."""

    @property
    def is_open(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come by the clock, whatever the engine does."""

    arrivals_s: Sequence[float]
    """From the start, of each task in order. Later turns of a conversation have none: they follow the answer."""

    @property
    def is_open(self) -> bool:
        return True


Pace = Closed | Open


def poisson_arrivals(count: int, *, rate: float, seed: int = 0) -> list[float]:
    """`count` arrivals of a Poisson process of `rate` a second; the first one is at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def constant_arrivals(count: int, *, rate: float) -> list[float]:
    return [number / rate for number in range(count)]


def trace_arrivals(tasks: Sequence[Task], *, speed: float = 1.0) -> list[float]:
    """The trace's own times, from its first request, divided by `speed`.

    Raises:
        ValueError: a request has none.
    """
    times: list[float] = []
    for task in tasks:
        if task.after is None and task.at_s is None:
            raise ValueError(
                f"request {task.task_id} of the dataset has no timestamp: --trace_speed needs one in each line"
            )
        times.append(task.at_s or 0.0)
    first_s = min(time_s for task, time_s in zip(tasks, times) if task.after is None)
    return [(time_s - first_s) / speed for time_s in times]


class Turns:
    """What is to be handed over next. A later turn becomes known when the turn before it has ended.

    `tasks` is the list as it was really asked: a later turn's prompt grows by its conversation so far.
    """

    def __init__(self, tasks: Sequence[Task], pace: Pace) -> None:
        self.tasks = list(tasks)
        self.has_later_turns = any(task.after is not None for task in tasks)
        self._next_turn = {task.after: number for number, task in enumerate(tasks) if task.after is not None}
        self._answers: dict[int, list[int]] = {number: [] for number in self._next_turn}
        self._pace = pace
        self._count = itertools.count()
        self._num_running = 0
        self._zero_s: float | None = None
        self._waiting: list[tuple[float, int, int]] = []
        """A heap of (when, order, task): from the start in an open loop, 0 in a closed one."""
        for number, task in enumerate(tasks):
            if task.after is None:
                self._wait(pace.arrivals_s[number] if isinstance(pace, Open) else 0.0, number)

    @property
    def next_s(self) -> float | None:
        """When the next request of an open loop is due; None: it waits for an answer, or there is none."""
        if not isinstance(self._pace, Open) or not self._waiting or self._zero_s is None:
            return None
        return self._zero_s + self._waiting[0][0]

    def due(self, now_s: float) -> list[tuple[int, float]]:
        """Tasks to hand over now, with the time that they are due at: a late hand-over counts as waiting."""
        if self._zero_s is None:
            self._zero_s = now_s
        found: list[tuple[int, float]] = []
        if isinstance(self._pace, Open):
            while self._waiting and self._zero_s + self._waiting[0][0] <= now_s:
                at_s, _, number = heapq.heappop(self._waiting)
                found.append((number, self._zero_s + at_s))
        else:
            room = (self._pace.concurrency or len(self.tasks)) - self._num_running
            while self._waiting and len(found) < room:
                found.append((heapq.heappop(self._waiting)[2], now_s))
        self._num_running += len(found)
        return found

    def keep(self, number: int, tokens: Sequence[int]) -> None:
        """Tokens of an answer, if a later turn needs them."""
        if number in self._answers:
            self._answers[number] += tokens

    def end(self, number: int, now_s: float) -> None:
        """A request has ended: its next turn, if it has one, goes before the conversations that haven't begun."""
        self._num_running -= 1
        following = self._next_turn.get(number)
        if following is None:
            return
        before, answer, turn = self.tasks[number], self._answers[number], self.tasks[following]
        self.tasks[following] = replace(turn, prompt=[*before.prompt, *answer, *turn.prompt])
        assert self._zero_s is not None
        self._wait(now_s - self._zero_s if isinstance(self._pace, Open) else -1.0, following)

    def _wait(self, at_s: float, number: int) -> None:
        heapq.heappush(self._waiting, (at_s, next(self._count), number))
