"""A report as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.report import LATENCIES, Lengths, Point, Report, Slo, Spread

__all__ = ["as_table", "simulation_lines", "sweep_rows"]

MIB = 1 << 20
SHOWN = ("mean", "p50", "p90", "p99")


def as_table(report: Report) -> str:
    """What was measured, then the figures: of the one run in full, of several a line each."""
    lines = [
        ("model", f"{report.model['name']} ({report.model['type']}, {report.model['dtype']})"),
        ("device", str(report.machine["device"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.machine["versions"].items())),
        ("dataset", _dataset(report)),
    ]
    if report.memory:
        lines.append(("memory", _memory(report.memory)))
    if report.startup_s is not None:
        lines.append(("start", f"{report.startup_s:.1f} s"))
    if report.slo is not None:
        lines.append(("SLO", slo_text(report.slo)))
    lines += simulation_lines(report)
    if len(report.points) == 1:
        point = report.points[0]
        lines += _point_lines(point)
        latencies = [_latency_row(meaning, point.latency.get(name)) for name, meaning in LATENCIES.items()]
        tail = [f"  {'milliseconds':<32}" + "".join(f"{name:>12}" for name in SHOWN), *filter(None, latencies)]
    else:
        tail = columns(sweep_rows(report))
    return "\n".join([*(f"{name:<12}{text}" for name, text in lines), "", *tail])


def simulation_lines(report: Report) -> list[tuple[str, str]]:
    """What is behind figures that nobody measured."""
    said = report.simulation
    if said is None:
        return []
    counts, source = said.num_instances, said.calibration.get("source")
    router = f", routed by {said.router}" if max(counts) > 1 else ""
    lines = [("simulated", f"{_of_points(counts)} instance{'' if set(counts) == {1} else 's'}{router}")]
    error = said.calibration.get("error")
    measured = f"calibrated by {source}" + ("" if error is None else f", whose steps it meets within {error:.1%}")
    lines.append(("model", measured if source else "an estimate: not calibrated"))
    busy = [sum(shares) / len(shares) for shares in said.busy_shares]
    lines.append(("busy", f"{_of_points([f'{share:.0%}' for share in busy])} of the time"))
    if any(said.num_preempted):
        lines.append(("preempted", _of_points(said.num_preempted)))
    lines.append(("speed", f"{_of_points([f'{ratio:,.1f}' for ratio in said.speed_ups])} times real time on one core"))
    return lines


def _of_points(values: Sequence[object]) -> str:
    """One for each load, or one for all."""
    return ", ".join(map(str, values if len(set(values)) > 1 else values[:1]))


def sweep_rows(report: Report) -> list[tuple[str, ...]]:
    """A header and a row for each point; times in milliseconds."""
    head = ["load", "done", "req/s", "out tok/s", "tok/s/GPU", "tok/s/user", "TTFT p50", "TTFT p99", "TPOT p50",
            "TPOT p99", "E2E p99"]  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for point in report.points:
        result, goodput = point.result, point.goodput
        cells = [
            point.load.name,
            f"{result.num_done}/{result.num_requests}",
            f"{result.requests_per_s:,.2f}",
            f"{result.output_tokens_per_s:,.1f}",
            f"{result.output_tokens_per_s_per_gpu:,.1f}",
            _number(result.output_tokens_per_s_per_user),
            *(_ms(point.latency.get(name), share) for name in ("ttft_s", "tpot_s") for share in ("p50", "p99")),
            _ms(point.latency.get("e2e_s"), "p99"),
        ]
        if report.slo is not None:
            cells.append("-" if goodput is None else f"{goodput.requests_per_s:,.2f} ({goodput.share:.0%})")
        rows.append(tuple(cells))
    if report.slo is not None:
        head.append("goodput req/s")
    return [tuple(head), *rows]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their header, the first column to the left and the others to the right."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if not number else cell.rjust(width)
                  for number, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]  # fmt: skip


def slo_text(slo: Slo) -> str:
    return ", ".join(f"{name.removesuffix('_s').upper()} <= {limit * 1000:g} ms" for name, limit in slo.limits.items())


def _point_lines(point: Point) -> list[tuple[str, str]]:
    result = point.result
    steps = "" if result.num_steps is None else f" in {result.num_steps:,} steps"
    lines = [
        ("requests", f"{result.num_done} of {result.num_requests} done, {point.load.name}"),
        (
            "tokens",
            f"{result.input_tokens:,} in ({result.cache_hit_rate:.1%} from the cache), {result.output_tokens:,} out",
        ),
        ("duration", f"{result.duration_s:.3f} s{steps}"),
        (
            "throughput",
            f"{result.output_tokens_per_s:,.1f} output tokens/s, {result.total_tokens_per_s:,.1f} total tokens/s,"
            f" {result.requests_per_s:,.2f} requests/s",
        ),
        (
            "tokens/s",
            f"{result.output_tokens_per_s_per_gpu:,.1f} a GPU, {_number(result.output_tokens_per_s_per_user)} a user"
            f" ({_number(result.decode_tokens_per_s_per_user)} after the first token)",
        ),
    ]
    if (good := point.goodput) is not None:
        share = f"{good.num_requests} of {result.num_requests} requests ({good.share:.1%})"
        lines.append(("goodput", f"{good.requests_per_s:,.2f} requests/s, {share} keep the SLO"))
    return lines


def _dataset(report: Report) -> str:
    workload = report.workload
    text = f"{workload.dataset}: {_lengths(workload.input_len)} in, {_lengths(workload.output_len)} out"
    count = workload.num_conversations
    return f"{text}, {count} conversation{'s' if count > 1 else ''}" if count else text


def _lengths(lengths: Lengths) -> str:
    if lengths.min == lengths.max:
        return str(lengths.min)
    return f"{lengths.min} to {lengths.max} (mean {lengths.mean:.0f})"


def _memory(memory: Mapping[str, Any]) -> str:
    parts = [
        f"KV cache for {memory['kv_cache_tokens']:,} tokens",
        f"process at most {memory['peak_rss_bytes'] / MIB:,.0f} MiB",
    ]
    if memory["device_peak_bytes"] is not None:
        parts.append(f"device at most {memory['device_peak_bytes'] / MIB:,.0f} MiB")
    return ", ".join(parts)


def _latency_row(meaning: str, spread: Spread | None) -> str:
    return "" if spread is None else f"  {meaning:<32}" + "".join(f"{_ms(spread, name):>12}" for name in SHOWN)


def _ms(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else f"{getattr(spread, name) * 1000:,.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
