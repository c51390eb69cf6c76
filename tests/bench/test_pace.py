from __future__ import annotations

import numpy as np
import pytest

from headrace.bench.pace import Closed, Open, Turns, constant_arrivals, poisson_arrivals, trace_arrivals
from headrace.bench.workload import Task

TASKS = [Task(number, [1], 1) for number in range(4)]


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    arrivals = poisson_arrivals(20_001, rate=4.0, seed=1)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0 and gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03) and gaps.std() == pytest.approx(1 / 4, rel=0.03)
    assert arrivals[:5] == poisson_arrivals(5, rate=4.0, seed=1) != poisson_arrivals(5, rate=4.0, seed=2)
    assert poisson_arrivals(0, rate=1.0) == [] and poisson_arrivals(1, rate=1.0) == [0.0]
    assert constant_arrivals(3, rate=2.0) == [0.0, 0.5, 1.0]


def test_a_trace_begins_with_its_first_request() -> None:
    tasks = [Task(0, [1], 1, at_s=7.0), Task(1, [1], 1, at_s=5.0), Task(1, [1], 1, after=1)]
    assert trace_arrivals(tasks, speed=2.0)[:2] == [1.0, 0.0]
    with pytest.raises(ValueError, match="request 2 of the dataset has no timestamp"):
        trace_arrivals(TASKS[2:])


def test_a_closed_loop_refills() -> None:
    turns = Turns(TASKS, Closed(2))
    assert turns.due(10.0) == [(0, 10.0), (1, 10.0)] and turns.due(11.0) == []
    turns.end(1, 12.0)
    assert turns.due(12.0) == [(2, 12.0)] and turns.next_s is None


def test_an_open_loop_follows_the_clock_in_any_order_of_its_tasks() -> None:
    turns = Turns(TASKS, Open([0.0, 3.0, 1.0, 2.0]))
    assert turns.due(100.0) == [(0, 100.0)] and turns.next_s == 101.0
    assert turns.due(102.5) == [(2, 101.0), (3, 102.0)] and turns.next_s == 103.0
    assert turns.due(103.0) == [(1, 103.0)] and turns.next_s is None
