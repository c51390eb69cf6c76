"""The report of a run: arithmetic, JSON and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.bench.record import Record
from headrace.bench.workload import Task

__all__ = ["Spread", "as_table", "make_report", "output_rows", "request_rows", "workload_facts"]

MIB = 1 << 20
LATENCIES = (
    ("queue_s", "waiting in the queue"),
    ("ttft_s", "to the first token (TTFT)"),
    ("tpot_s", "a token after the first (TPOT)"),
    ("itl_s", "between two arrivals (ITL)"),
    ("e2e_s", "whole request (E2E)"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity spreads; percentiles interpolate linearly between neighbours."""

    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: NDArray[Any]) -> Spread | None:
        """Over the values that are not NaN; None if there are none."""
        values = values[~np.isnan(values)]
        if not len(values):
            return None
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        return Spread(float(values.mean()), float(values.min()), p50, p90, p99, float(values.max()))


def make_report(record: Record, *, kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run as plain values. Keys carry their units; token rates count what really came back.

    Args:
        kind: `throughput` or `latency`.
        facts: what the caller knows: `model`, `machine`, `settings`, `workload`, `memory`, and so on.
    """
    num_input, num_output = int(record.num_input.sum()), int(record.num_output.sum())
    num_cached = int(record.num_cached().sum())
    errors = record.errors()
    num_done = len(record.tasks) - len(errors)
    duration_s = record.duration_s
    latency = {name: Spread.of(getattr(record, name)()) for name, _ in LATENCIES}
    return {
        "kind": kind,
        **facts,
        "result": {
            "duration_s": duration_s,
            "num_requests": len(record.tasks),
            "num_done": num_done,
            "num_failed": len(errors),
            "first_errors": errors[:3],
            "input_tokens": num_input,
            "output_tokens": num_output,
            "cached_tokens": num_cached,
            "cache_hit_rate": num_cached / num_input,
            "num_steps": record.num_steps,
            "requests_per_s": num_done / duration_s,
            "output_tokens_per_s": num_output / duration_s,
            "total_tokens_per_s": (num_input + num_output) / duration_s,
            "mean_concurrency": float(record.e2e_s().sum()) / duration_s,
        },
        "latency": {name: None if spread is None else asdict(spread) for name, spread in latency.items()},
    }


def workload_facts(tasks: Sequence[Task]) -> dict[str, Any]:
    """Lengths that the tasks ask for."""
    lengths = {
        "input_len": np.array([len(task.prompt) for task in tasks]),
        "output_len": np.array([task.num_output for task in tasks]),
    }
    return {
        name: {"mean": float(values.mean()), "min": int(values.min()), "max": int(values.max())}
        for name, values in lengths.items()
    }


def request_rows(record: Record) -> list[dict[str, Any]]:
    """The figures of each request, in the order of the workload."""
    figures = {name: getattr(record, name)().tolist() for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")}
    start_s = (record.start_s - record.start_s.min()).tolist()
    num_output = record.num_output.tolist()
    return [
        {
            "task_id": task.task_id,
            "start_s": start_s[number],
            "input_tokens": len(task.prompt),
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


def as_table(report: Mapping[str, Any]) -> str:
    """For people."""
    result, workload, model = report["result"], report["workload"], report["model"]
    machine, memory = report["machine"], report["memory"]
    concurrency = workload["concurrency"]
    pace = "all at once" if concurrency is None else f"{concurrency} at a time"
    lines = [
        ("model", f"{model['name']} ({model['type']}, {model['dtype']})"),
        ("device", machine["device"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine["versions"].items())),
        ("dataset", _dataset(workload)),
        ("requests", f"{result['num_done']} of {result['num_requests']} done, {pace}"),
        (
            "tokens",
            f"{result['input_tokens']:,} in ({result['cache_hit_rate']:.1%} from the cache),"
            f" {result['output_tokens']:,} out",
        ),
        ("duration", f"{result['duration_s']:.3f} s in {result['num_steps']:,} steps"),
        (
            "throughput",
            f"{result['output_tokens_per_s']:,.1f} output tokens/s, {result['total_tokens_per_s']:,.1f} total tokens/s,"
            f" {result['requests_per_s']:,.2f} requests/s",
        ),
        ("memory", _memory(memory)),
        ("start", f"{report['startup_s']:.1f} s"),
    ]
    head = f"  {'milliseconds':<32}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99"))
    rows = [_latency_row(meaning, report["latency"][name]) for name, meaning in LATENCIES]
    return "\n".join([*(f"{name:<12}{text}" for name, text in lines), "", head, *filter(None, rows)])


def _dataset(workload: Mapping[str, Any]) -> str:
    return f"{workload['dataset']}: {_lengths(workload['input_len'])} in, {_lengths(workload['output_len'])} out"


def _lengths(lengths: Mapping[str, Any]) -> str:
    low, high = lengths["min"], lengths["max"]
    return str(low) if low == high else f"{low} to {high} (mean {lengths['mean']:.0f})"


def _memory(memory: Mapping[str, Any]) -> str:
    parts = [
        f"KV cache for {memory['kv_cache_tokens']:,} tokens",
        f"process at most {memory['peak_rss_bytes'] / MIB:,.0f} MiB",
    ]
    if memory["device_peak_bytes"] is not None:
        parts.append(f"device at most {memory['device_peak_bytes'] / MIB:,.0f} MiB")
    return ", ".join(parts)


def _latency_row(meaning: str, spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return ""
    return f"  {meaning:<32}" + "".join(f"{spread[name] * 1000:>12,.2f}" for name in ("mean", "p50", "p90", "p99"))
