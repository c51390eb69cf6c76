from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import wire
from headrace.bench.record import Record
from headrace.bench.report import Spread, as_table, make_report, output_rows, request_rows, workload_facts
from headrace.bench.workload import Task
from headrace.types import Delta, RequestTimes

FIRST_ID = 700
FACTS: dict[str, Any] = {
    "model": {"name": "tiny", "type": "llama", "dtype": "float32"},
    "machine": {"device": "a processor", "versions": {"headrace": "0", "torch": "1"}},
    "memory": {"kv_cache_tokens": 1000, "peak_rss_bytes": 3 << 20, "device_peak_bytes": None},
    "startup_s": 1.5,
}


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between the neighbours of the position, by hand."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_spread(values: list[float]) -> None:
    spread = Spread.of(np.array(values))
    assert spread is not None
    assert (spread.min, spread.max) == (min(values), max(values))
    assert spread.mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    for share, found in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
        assert found == pytest.approx(percentile(values, share), abs=1e-6)
        assert found == pytest.approx(float(np.percentile(values, share * 100)), abs=1e-6)


def test_spread_leaves_out_what_is_not_there() -> None:
    spread = Spread.of(np.array([np.nan, 2.0, 4.0, np.nan]))
    assert spread is not None and (spread.mean, spread.p50) == (3.0, 3.0)
    assert Spread.of(np.array([np.nan])) is None
    assert Spread.of(np.array([])) is None


def outputs(step: int, plain: dict[int, int], *deltas: Delta) -> wire.Outputs:
    ids = np.array([FIRST_ID + number for number in plain], np.int64)
    return wire.Outputs(step, ids.tobytes(), np.array(list(plain.values()), np.int32).tobytes(), list(deltas))


def end(number: int, tokens: list[int], **fields: Any) -> Delta:
    times = RequestTimes(first_scheduled_s=10.0 + number)
    return Delta(id=FIRST_ID + number, tokens=tokens, **{"finish": "length", "times": times, **fields})


@pytest.fixture
def record() -> Record:
    """Request 0: tokens at 11, 12, 12 (two at once), 16. Request 1: one, at 13. Request 2: refused at 14."""
    tasks = [Task(5, [1, 2, 3, 4], 4), Task(6, [1, 2], 1), Task(7, [9] * 10, 3)]
    messages = [
        (11.0, outputs(21, {0: 40})),
        (12.0, outputs(22, {}, Delta(id=FIRST_ID, tokens=[41, 42]))),
        (13.0, outputs(23, {}, end(1, [50], cached_tokens=1))),
        (14.0, outputs(23, {}, end(2, [], finish="error", error="too long", times=None))),
        (16.0, outputs(25, {}, end(0, [43], cached_tokens=3))),
    ]
    return Record.of(tasks, [9.0, 10.0, 10.0], messages, first_id=FIRST_ID, steps_before=20)


def test_times_by_request(record: Record) -> None:
    assert record.output_ids() == [[40, 41, 42, 43], [50], []]
    assert record.duration_s == 7.0
    assert record.ttft_s()[:2].tolist() == [2.0, 3.0] and np.isnan(record.ttft_s()[2])
    assert record.tpot_s()[0] == pytest.approx(5 / 3) and np.isnan(record.tpot_s()[1:]).all()
    assert record.itl_s().tolist() == [1.0, 4.0]
    assert record.e2e_s().tolist() == [7.0, 3.0, 4.0]
    assert record.queue_s()[:2].tolist() == [1.0, 1.0] and np.isnan(record.queue_s()[2])


def test_report(record: Record) -> None:
    workload = {"dataset": "random", "concurrency": None, **workload_facts(record.tasks)}
    report = make_report(record, kind="throughput", facts={**FACTS, "workload": workload})
    assert report["result"] == {
        "duration_s": 7.0,
        "num_requests": 3,
        "num_done": 2,
        "num_failed": 1,
        "first_errors": ["request 7: too long"],
        "input_tokens": 16,
        "output_tokens": 5,
        "cached_tokens": 4,
        "cache_hit_rate": 0.25,
        "num_steps": 5,
        "requests_per_s": 2 / 7,
        "output_tokens_per_s": 5 / 7,
        "total_tokens_per_s": 3.0,
        "mean_concurrency": 2.0,
    }
    assert report["workload"]["input_len"] == {"mean": pytest.approx(16 / 3), "min": 2, "max": 10}
    assert set(report["latency"]) == {"queue_s", "ttft_s", "tpot_s", "itl_s", "e2e_s"}
    assert report["latency"]["ttft_s"] == {"mean": 2.5, "min": 2.0, "p50": 2.5, "p90": 2.9, "p99": 2.99, "max": 3.0}
    assert json.loads(json.dumps(report, allow_nan=False)) == report

    table = as_table(report)
    assert "2 of 3 done, all at once" in table and "0.7 output tokens/s" in table
    (ttft,) = [line for line in table.splitlines() if "TTFT" in line]
    assert ttft.split()[-4:] == ["2,500.00", "2,500.00", "2,900.00", "2,990.00"]


def test_rows_by_request(record: Record) -> None:
    rows = json.loads(json.dumps(request_rows(record), allow_nan=False))
    assert [row["task_id"] for row in rows] == [5, 6, 7]
    assert rows[0]["tpot_s"] == pytest.approx(5 / 3) and rows[0]["start_s"] == 0.0
    assert rows[1] == {
        "task_id": 6, "start_s": 1.0, "input_tokens": 2, "cached_tokens": 1, "output_tokens": 1, "finish": "length",
        "error": None, "queue_s": 1.0, "ttft_s": 3.0, "tpot_s": None, "e2e_s": 3.0,
    }  # fmt: skip
    assert rows[2]["error"] == "too long" and rows[2]["ttft_s"] is None
    assert output_rows(record)[1] == {"task_id": 6, "finish": "length", "output_ids": [50]}


def test_a_latency_that_nobody_has_leaves_its_line_out() -> None:
    messages = [(2.0, outputs(1, {}, end(0, [7], times=RequestTimes(first_scheduled_s=1.5))))]
    record = Record.of([Task(0, [1], 1)], [1.0], messages, first_id=FIRST_ID, steps_before=0)
    workload = {"dataset": "random", "concurrency": 1, **workload_facts(record.tasks)}
    report = make_report(record, kind="latency", facts={**FACTS, "workload": workload})
    assert report["latency"]["tpot_s"] is None and report["latency"]["itl_s"] is None
    assert "TPOT" not in as_table(report) and "TTFT" in as_table(report)
