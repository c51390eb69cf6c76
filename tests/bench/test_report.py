from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import wire
from headrace.bench.compare import compare, comparison_table
from headrace.bench.page import as_page
from headrace.bench.record import Record
from headrace.bench.report import (
    Load,
    Point,
    Report,
    Slo,
    Spread,
    Workload,
    make_point,
    output_rows,
    read_report,
    request_rows,
    write_report,
)
from headrace.bench.table import as_table
from headrace.bench.workload import Task
from headrace.types import Delta, RequestTimes

FIRST_ID = 700
FACTS: dict[str, Any] = {
    "model": {"name": "tiny", "type": "llama", "dtype": "float32"},
    "machine": {"device": "a processor", "versions": {"headrace": "0", "torch": "1"}},
    "memory": {"kv_cache_tokens": 1000, "peak_rss_bytes": 3 << 20, "device_peak_bytes": None},
    "startup_s": 1.5,
    "date": "2026-01-01",
    "settings": {},
}
CLOSED = Load(pattern="closed")


def report_of(*points: Point, tasks: Any, **changes: Any) -> Report:
    workload = Workload.of(tasks, dataset="random", seed=0, warmup=0, eos_id=-1)
    return Report(
        **{"kind": "throughput", "num_gpus": 2, **FACTS, "workload": workload, "points": list(points), **changes}
    )


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
    assert record.e2e_s()[:2].tolist() == [7.0, 3.0] and np.isnan(record.e2e_s()[2])
    assert record.queue_s()[:2].tolist() == [1.0, 1.0] and np.isnan(record.queue_s()[2])


def test_report(record: Record, tmp_path: Path) -> None:
    point = make_point(record, CLOSED, num_gpus=2, slo=Slo(ttft_s=2.5))
    result = json.loads(msgspec.json.encode(point.result))
    assert result.pop("output_tokens_per_s_per_user") == pytest.approx((4 / 7 + 1 / 3) / 2)
    assert result.pop("decode_tokens_per_s_per_user") == pytest.approx(3 / 5)
    assert result == {
        "duration_s": 7.0,
        "num_requests": 3,
        "num_done": 2,
        "first_errors": ["request 7: too long"],
        "input_tokens": 6,
        "output_tokens": 5,
        "cached_tokens": 4,
        "num_steps": 5,
        "requests_per_s": 2 / 7,
        "output_tokens_per_s": 5 / 7,
        "total_tokens_per_s": 11 / 7,
        "output_tokens_per_s_per_gpu": 5 / 14,
        "mean_concurrency": 2.0,
    }
    assert set(point.latency) == {"queue_s", "ttft_s", "tpot_s", "itl_s", "e2e_s"}
    ttft = point.latency["ttft_s"]
    assert ttft is not None
    assert (ttft.mean, ttft.min, ttft.p50, ttft.p90, ttft.p99, ttft.max) == pytest.approx((2.5, 2, 2.5, 2.9, 2.99, 3))

    report = report_of(point, tasks=record.tasks)
    path = tmp_path / "report.json"
    write_report(report, path)
    assert read_report(path) == report and json.loads(path.read_text())["schema_version"] == 2
    table = as_table(report)
    assert "2 of 3 done, all at once" in table and "0.7 output tokens/s" in table and "1 of 3 requests (33.3%)" in table
    (line,) = [line for line in table.splitlines() if "TTFT" in line]
    assert line.split()[-4:] == ["2,500.00", "2,500.00", "2,900.00", "2,990.00"]


def test_goodput_counts_what_keeps_every_limit(record: Record) -> None:
    def num_met(**limits: float) -> int:
        goodput = make_point(record, CLOSED, slo=Slo(**limits)).goodput
        assert goodput is not None
        return goodput.num_requests

    assert num_met(ttft_s=3.0) == 2 and num_met(ttft_s=2.0) == 1 and num_met(ttft_s=1.9) == 0
    assert num_met(tpot_s=1.0) == 1  # the request with one token has no TPOT, the other one's is 5/3
    assert num_met(ttft_s=2.0, e2e_s=6.0) == 0


def test_what_is_no_report_is_refused(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(ValueError, match="give a file that --report_json wrote"):
        read_report(path)
    for text, problem in (
        ("{}", "schema_version is None"),
        ('{"schema_version": 9}', "measure again"),
        ('{"schema_version": 2}', "missing required field `kind`"),
        ("[", "is no report"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_report(path)


def test_comparing(record: Record) -> None:
    point = make_point(record, CLOSED)
    slower = msgspec.structs.replace(point.result, output_tokens_per_s=point.result.output_tokens_per_s * 0.9)
    faster = dict(point.latency)
    ttft = point.latency["ttft_s"]
    assert ttft is not None
    faster["ttft_s"] = msgspec.structs.replace(ttft, p99=ttft.p99 / 2)
    before = report_of(point, tasks=record.tasks)
    after = report_of(
        msgspec.structs.replace(point, result=slower, latency=faster),
        msgspec.structs.replace(point, load=Load(pattern="closed", concurrency=3)),
        tasks=record.tasks,
        settings={"max_batch_size": 3},
    )
    found = compare(before, after)
    changed = {change.metric.name: change.verdict for change in found.changes if change.verdict != "same"}
    assert changed == {"output tokens/s": "worse", "TTFT p99": "better"} and found.num_worse == 1
    assert found.differences == ["settings: {} against None", "settings.max_batch_size: None against 3",
                                 "only in one of them: 3 at a time"]  # fmt: skip
    assert "1 better" in comparison_table(found) and "1 worse" in comparison_table(found)
    assert compare(before, after, threshold=0.6).num_worse == 0


@pytest.mark.parametrize(
    ("before_s", "after_s", "verdict", "ratio"),
    [
        (0.0, 0.0, "same", "n/a"),
        (0.0, 0.000_004, "same", "n/a"),
        (0.0, 0.001, "worse", "n/a"),
        (0.001, 0.0, "better", "0.000"),
    ],
)
def test_comparing_with_0(before_s: float, after_s: float, verdict: str, ratio: str, record: Record) -> None:
    """A share of 0 says nothing; tokens that arrive together, and no request within its limits, are 0."""
    point = make_point(record, CLOSED, slo=Slo(e2e_s=1e-9))
    itl, goodput = point.latency["itl_s"], point.goodput
    assert itl is not None and goodput is not None and goodput.requests_per_s == 0

    def report(itl_s: float, requests_per_s: float) -> Report:
        latency = {"itl_s": msgspec.structs.replace(itl, p50=itl_s)}
        good = msgspec.structs.replace(goodput, requests_per_s=requests_per_s)
        return report_of(msgspec.structs.replace(point, latency=latency, goodput=good), tasks=record.tasks)

    found = compare(report(before_s, 0.0), report(after_s, 1.0))
    rows = {line[:22].strip(): line.split()[-2:] for line in comparison_table(found).splitlines()}
    assert rows["ITL p50 (ms)"] == [ratio, verdict] and rows["goodput requests/s"] == ["n/a", "better"]
    assert rows["ITL p99 (ms)"] == ["1.000", "same"]


def test_the_page_escapes_what_it_shows(record: Record) -> None:
    report = report_of(make_point(record, CLOSED), tasks=record.tasks, model={**FACTS["model"], "name": "<script>x"})
    page = as_page(report, {"one": b"PNG"})
    assert "<script>" not in page and "&lt;script&gt;x" in page and "data:image/png;base64,UE5H" in page


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
    point = make_point(record, CLOSED)
    assert point.latency["tpot_s"] is None and point.latency["itl_s"] is None
    table = as_table(report_of(point, tasks=record.tasks))
    assert "TPOT" not in table and "TTFT" in table
