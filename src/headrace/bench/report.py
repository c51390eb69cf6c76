"""The report of a measurement: one data model, its arithmetic, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.bench.record import Record
from headrace.bench.workload import Task

__all__ = [
    "LATENCIES", "SCHEMA_VERSION", "Goodput", "Lengths", "Load", "Point", "Report", "Result", "Simulation", "Slo",
    "Spread", "Step", "Workload", "make_point", "output_rows", "read_report", "request_rows", "write_report",
]  # fmt: skip

SCHEMA_VERSION = 2
"""Of the JSON. Version 1 had one `result` and no `schema_version`; new fields with a default don't change it."""
LATENCIES = {
    "queue_s": "waiting in the queue",
    "ttft_s": "to the first token (TTFT)",
    "tpot_s": "a token after the first (TPOT)",
    "itl_s": "between two arrivals (ITL)",
    "e2e_s": "whole request (E2E)",
}
"""Name -> what it is. Each is a method of Record."""
PER_REQUEST = ("queue_s", "ttft_s", "tpot_s", "e2e_s")
NUM_CURVE_POINTS = 101
Kind = Literal["throughput", "latency", "serve", "simulate"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantity spreads; percentiles interpolate linearly between neighbours."""

    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float
    curve: list[float] = []
    """The quantiles 0, 1, 2 ... 100%."""

    @staticmethod
    def of(values: NDArray[Any]) -> Spread | None:
        """Over the values that are not NaN; None if there are none."""
        values = values[~np.isnan(values)]
        if not len(values):
            return None
        curve = np.quantile(values, np.linspace(0, 1, NUM_CURVE_POINTS)).tolist()
        return Spread(
            mean=float(values.mean()), min=curve[0], p50=curve[50], p90=curve[90], p99=curve[99], max=curve[100],
            curve=curve,
        )  # fmt: skip


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    mean: float
    min: int
    max: int

    @staticmethod
    def of(values: Sequence[int]) -> Lengths:
        return Lengths(mean=sum(values) / len(values), min=min(values), max=max(values))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    dataset: str
    seed: int
    warmup: int
    eos_id: int
    """Token that ended a request early; -1 is none."""
    input_len: Lengths
    """Of a conversation's later turns: what the turn adds."""
    output_len: Lengths
    num_conversations: int = 0
    """Of several turns each."""

    @staticmethod
    def of(tasks: Sequence[Task], *, dataset: str, seed: int, warmup: int, eos_id: int) -> Workload:
        return Workload(
            dataset=dataset,
            seed=seed,
            warmup=warmup,
            eos_id=eos_id,
            input_len=Lengths.of([len(task.prompt) for task in tasks]),
            output_len=Lengths.of([task.num_output for task in tasks]),
            num_conversations=len({task.after for task in tasks} & {n for n, t in enumerate(tasks) if t.after is None}),
        )


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests were handed over in one run."""

    pattern: Literal["closed", "poisson", "constant", "trace"]
    concurrency: int | None = None
    """Closed loop: most requests at once; None hands all over together."""
    request_rate: float | None = None
    """Requests per second of a Poisson or constant arrival."""
    trace_speed: float | None = None
    """A trace's own times divided by this."""

    @property
    def name(self) -> str:
        if self.pattern == "closed":
            return "all at once" if self.concurrency is None else f"{self.concurrency} at a time"
        if self.pattern == "trace":
            return f"trace x{self.trace_speed:g}"
        return f"{self.request_rate:g}/s {self.pattern}"


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one request, in seconds; None is no limit. A request without such a time keeps it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def is_met(self, record: Record) -> NDArray[np.bool_]:
        """[requests]; a request that failed has met nothing."""
        met = ~record.is_failed
        for name, limit in self.limits.items():
            values = getattr(record, name)()
            met &= np.isnan(values) | (values <= limit)
        return met


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What kept every limit of the SLO."""

    num_requests: int
    share: float
    """Of all requests, the failed ones too."""
    requests_per_s: float
    output_tokens_per_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run; token rates count what really came back."""

    duration_s: float
    """From the first request to the end of the last one."""
    num_requests: int
    num_done: int
    first_errors: list[str]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Of the input, from the cache."""
    num_steps: int | None
    """None: a server doesn't tell."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    output_tokens_per_s_per_user: float | None
    """Mean over requests of output tokens / E2E; None where nothing was done."""
    decode_tokens_per_s_per_user: float | None
    """Mean over requests of 1 / TPOT."""
    mean_concurrency: float

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_done

    @property
    def cache_hit_rate(self) -> float:
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the workload under one load."""

    load: Load
    result: Result
    latency: dict[str, Spread | None]
    """By the names of LATENCIES."""
    goodput: Goodput | None = None


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What one step computed, and its time: what a simulation is calibrated with."""

    num_rows: int
    num_tokens: int
    num_sampled: int
    """Rows that yielded a token."""
    pairs: list[int]
    """By layer group, (query, key) pairs of one layer."""
    reads: list[int]
    """By layer group, tokens whose keys and values were read."""
    seconds: float
    """From when it was submitted, or the step before was done, until its tokens were there."""
    host_s: float
    """From the tokens of the step before until it was submitted."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What was modelled instead of measured."""

    num_instances: list[int]
    """Of each point."""
    router: str
    calibration: dict[str, Any]
    num_preempted: list[int]
    """Of each point."""
    busy_shares: list[list[float]]
    """Of each point and instance, the share of the time in which its devices worked."""
    speed_ups: list[float]
    """Of each point: simulated time / time of a core that it took to simulate."""
    sizing: list[dict[str, Any]] = []
    """What was tried on the way to the fewest instances."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement: what was measured, and a point for each load of the sweep. Keys carry their units."""

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    date: str
    model: dict[str, Any]
    machine: dict[str, Any]
    num_gpus: int
    """Devices that the tokens per second are divided by; 1 on a CPU."""
    settings: dict[str, Any]
    workload: Workload
    memory: dict[str, Any] = {}
    startup_s: float | None = None
    slo: Slo | None = None
    points: list[Point]
    steps: list[Step] = []
    """Of all points together, where `--record_steps` asked for them."""
    simulation: Simulation | None = None


def make_point(record: Record, load: Load, *, num_gpus: int = 1, slo: Slo | None = None) -> Point:
    """The figures of one run."""
    num_input, num_output = int(record.num_input.sum()), int(record.num_output.sum())
    num_cached = int(record.num_cached().sum())
    errors = record.errors()
    num_done = len(record.tasks) - len(errors)
    duration_s = record.duration_s
    is_done = ~record.is_failed & (record.num_output > 0)
    users = (record.num_output / record.e2e_s())[is_done]
    tpot_s = record.tpot_s()
    speeds = 1 / tpot_s[tpot_s > 0]
    result = Result(
        duration_s=duration_s,
        num_requests=len(record.tasks),
        num_done=num_done,
        first_errors=errors[:3],
        input_tokens=num_input,
        output_tokens=num_output,
        cached_tokens=num_cached,
        num_steps=record.num_steps,
        requests_per_s=num_done / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
        output_tokens_per_s_per_gpu=num_output / duration_s / num_gpus,
        output_tokens_per_s_per_user=float(users.mean()) if len(users) else None,
        decode_tokens_per_s_per_user=float(speeds.mean()) if len(speeds) else None,
        mean_concurrency=float(record.held_s.sum()) / duration_s,
    )
    latency = {name: Spread.of(getattr(record, name)()) for name in LATENCIES}
    return Point(load=load, result=result, latency=latency, goodput=None if slo is None else _goodput(record, slo))


def _goodput(record: Record, slo: Slo) -> Goodput:
    met = slo.is_met(record)
    return Goodput(
        num_requests=int(met.sum()),
        share=float(met.mean()),
        requests_per_s=float(met.sum()) / record.duration_s,
        output_tokens_per_s=float(record.num_output[met].sum()) / record.duration_s,
    )


def write_report(report: Report, path: Path) -> None:
    data = msgspec.json.format(msgspec.json.encode(report), indent=2)
    path.write_bytes(data + b"\n")


def read_report(path: Path) -> Report:
    """Raises ValueError: no such file, no report, or one of another version; with the field and the remedy."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a file that --report_json wrote") from None
    try:
        head: Any = msgspec.json.decode(data)
        version = head.get("schema_version") if isinstance(head, Mapping) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: schema_version is {version}, this version of headrace reads {SCHEMA_VERSION}: measure again"
            )
        return msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no report ({error}): give a file that --report_json wrote") from None


def request_rows(record: Record) -> list[dict[str, Any]]:
    """The figures of each request, in the order of the workload."""
    figures = {name: getattr(record, name)().tolist() for name in PER_REQUEST}
    start_s = (record.start_s - record.start_s.min()).tolist()
    num_input, num_output = record.num_input.tolist(), record.num_output.tolist()
    return [
        {
            "task_id": task.task_id,
            "start_s": start_s[number],
            "input_tokens": num_input[number],
            "cached_tokens": end.cached_tokens,
            "output_tokens": num_output[number],
            "finish": end.finish,
            "error": end.error or None,
            **{name: None if np.isnan(values[number]) else values[number] for name, values in figures.items()},
        }
        for number, (task, end) in enumerate(zip(record.tasks, record.ends))
    ]


def output_rows(record: Record) -> list[dict[str, Any]]:
    """What each request generated, in the order of the workload."""
    return [
        {"task_id": task.task_id, "finish": end.finish, "output_ids": ids}
        for task, end, ids in zip(record.tasks, record.ends, record.output_ids())
    ]
