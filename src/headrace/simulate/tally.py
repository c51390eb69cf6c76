"""What came back of a simulated workload: the arithmetic of a `Record` without a time for every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.bench.record import Record
from headrace.bench.workload import Task
from headrace.simulate.work import Longs
from headrace.types import Delta

MAX_GAPS = 2_000_000
"""Gaps between tokens that quantiles are taken of; beyond it each stands for several."""

Floats = NDArray[np.float64]


class Tally:
    """Collects tokens by request as they come, one message or a run of equal ones at a time."""

    def __init__(self, num_requests: int, *, first_id: int = 0) -> None:
        self._first_id = first_id
        self.count = np.zeros(num_requests, np.int64)
        self.first_s = np.full(num_requests, np.nan)
        self.last_s = np.full(num_requests, np.nan)
        self.start_s = np.full(num_requests, np.nan)
        self.end_s = np.zeros(num_requests)
        self.ends: list[Delta | None] = [None] * num_requests
        self.num_steps = 0
        self._gaps: list[Floats] = []
        self._weights: list[int] = []
        """How often each of the gaps in an array is there."""

    def add(self, ids: Longs, time_s: float) -> None:
        """One token for each of these requests; none is a first one."""
        requests = ids - self._first_id
        self._gaps.append(time_s - self.last_s[requests])
        self._weights.append(1)
        self.last_s[requests] = time_s
        self.count[requests] += 1

    def add_one(self, request_id: int, time_s: float) -> None:
        """A token that comes with other news."""
        request = request_id - self._first_id
        if self.count[request]:
            self._gaps.append(np.array([time_s - self.last_s[request]]))
            self._weights.append(1)
        else:
            self.first_s[request] = time_s
        self.last_s[request] = time_s
        self.count[request] += 1

    def add_run(self, ids: Longs, times_s: Floats) -> None:
        """One token for each at each of these times; none is a first one."""
        requests = ids - self._first_id
        self._gaps += [times_s[0] - self.last_s[requests], times_s[1:] - times_s[:-1]]
        self._weights += [1, len(requests)]
        self.last_s[requests] = times_s[-1]
        self.count[requests] += len(times_s)

    def end(self, delta: Delta, time_s: float) -> None:
        self.ends[delta.id - self._first_id] = delta
        self.end_s[delta.id - self._first_id] = time_s

    def gaps_s(self) -> Floats:
        if not self._gaps:
            return np.zeros(0)
        gaps = np.concatenate(self._gaps)
        weights = np.repeat(self._weights, [len(each) for each in self._gaps])
        gaps, weights = gaps[gaps > 0], weights[gaps > 0]
        total = int(weights.sum())
        if total > MAX_GAPS:
            order = np.argsort(gaps, kind="stable")
            at = np.searchsorted(np.cumsum(weights[order]), np.linspace(0, total, MAX_GAPS, endpoint=False), "right")
            return gaps[order][at]
        return np.repeat(gaps, weights)

    def record(self, tasks: Sequence[Task]) -> TalliedRecord:
        """`tasks` as they were asked; every one has ended."""
        nothing = np.zeros(0, np.int64)
        return TalliedRecord(
            tasks=tasks,
            start_s=self.start_s,
            end_s=self.end_s,
            request=nothing,
            token=nothing,
            time_s=np.zeros(0),
            ends=[end for end in self.ends if end is not None],
            num_steps=self.num_steps,
            tally=self,
        )


@dataclass(frozen=True)
class TalliedRecord(Record):
    """A `Record` whose `request`, `token` and `time_s` are empty: it knows the sums only."""

    tally: Tally = field(kw_only=True)

    @property
    def num_output(self) -> Longs:  # [requests]
        return self.tally.count

    @property
    def first_s(self) -> Floats:  # [requests]
        return self.tally.first_s

    @property
    def last_s(self) -> Floats:  # [requests]
        return self.tally.last_s

    def itl_s(self) -> Floats:  # [gaps]
        return self.tally.gaps_s()
