"""Two reports beside each other: what was not the same, and what got better or worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.bench.report import Load, Point, Report, Spread
from headrace.bench.table import columns

__all__ = ["Change", "Comparison", "compare", "comparison_table"]

UNCOMPARED = ("date",)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that two runs are judged by."""

    name: str
    unit: str
    more_is_better: bool


RATES = {
    "requests_per_s": Metric("requests/s", "", True),
    "output_tokens_per_s": Metric("output tokens/s", "", True),
    "output_tokens_per_s_per_gpu": Metric("output tokens/s/GPU", "", True),
    "output_tokens_per_s_per_user": Metric("output tokens/s/user", "", True),
}
TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
QUANTILES = ("mean", "p50", "p90", "p99")
SHOWN = 0.005
"""The least difference that two places after the point show, in the unit of the table."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure under one load."""

    load: str
    metric: Metric
    before: float
    after: float
    threshold: float

    @property
    def scale(self) -> int:
        """Of the unit that the table has."""
        return 1000 if self.metric.unit == "ms" else 1

    @property
    def ratio(self) -> float | None:
        """None against 0."""
        return self.after / self.before if self.before else None

    @property
    def verdict(self) -> str:
        """`same` within the threshold, either way. Against 0, of which no share can be taken, a difference counts that
        the table shows."""
        change = self.after - self.before
        least = self.threshold * abs(self.before) if self.before else SHOWN / self.scale
        if abs(change) <= least:
            return "same"
        return "better" if (change > 0) is self.metric.more_is_better else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    differences: list[str]
    """What the two measurements did not have in common, a line each."""
    changes: list[Change]

    @property
    def num_worse(self) -> int:
        return sum(change.verdict == "worse" for change in self.changes)


def compare(before: Report, after: Report, *, threshold: float = 0.05) -> Comparison:
    """Point by point of the same load. A change counts from `threshold` on: two runs are never quite equal, and a
    report knows nothing of how much one machine varies.

    Raises:
        ValueError: they have no load in common.
    """
    theirs = {point.load: point for point in after.points}
    pairs = [(point, theirs[point.load]) for point in before.points if point.load in theirs]
    if not pairs:
        names = [", ".join(point.load.name for point in report.points) for report in (before, after)]
        raise ValueError(f"the reports have no load in common ({names[0]} against {names[1]}): measure the same sweep")
    changes = [change for one, other in pairs for change in _changes(one, other, threshold)]
    missing = [point.load for point in before.points if point.load not in theirs]
    missing += [load for load in theirs if load not in {point.load for point in before.points}]
    return Comparison(_differences(before, after, missing), changes)


def comparison_table(comparison: Comparison) -> str:
    """For people."""
    rows = [("figure", "A", "B", "B / A", "verdict")]
    lines = [f"not the same: {line}" for line in comparison.differences]
    load = ""
    for change in comparison.changes:
        if change.load != load:
            load = change.load
            rows.append((load, "", "", "", ""))
        old, new = f"{change.before * change.scale:,.2f}", f"{change.after * change.scale:,.2f}"
        unit = f" ({change.metric.unit})" if change.metric.unit else ""
        ratio = "n/a" if change.ratio is None else f"{change.ratio:.3f}"
        rows.append((f"  {change.metric.name}{unit}", old, new, ratio, change.verdict))
    verdicts = [change.verdict for change in comparison.changes]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("better", "same", "worse"))
    return "\n".join([*lines, *([""] if lines else []), *columns(rows), "", counts])


def _changes(before: Point, after: Point, threshold: float) -> Iterator[Change]:
    load = before.load.name
    for name, metric in RATES.items():
        one, other = getattr(before.result, name), getattr(after.result, name)
        if one is not None and other is not None:
            yield Change(load, metric, one, other, threshold)
    if before.goodput is not None and after.goodput is not None:
        metric = Metric("goodput requests/s", "", True)
        yield Change(load, metric, before.goodput.requests_per_s, after.goodput.requests_per_s, threshold)
    for name in TIMES:
        spreads = before.latency.get(name), after.latency.get(name)
        if not (isinstance(spreads[0], Spread) and isinstance(spreads[1], Spread)):
            continue
        for quantile in QUANTILES:
            metric = Metric(f"{name.removesuffix('_s').upper()} {quantile}", "ms", False)
            yield Change(load, metric, getattr(spreads[0], quantile), getattr(spreads[1], quantile), threshold)


def _differences(before: Report, after: Report, missing: list[Load]) -> list[str]:
    named = ("kind", "model", "machine", "num_gpus", "settings", "workload", "slo")
    found: list[str] = []
    for name in named:
        one, other = (_flat(msgspec.to_builtins(getattr(report, name)), name) for report in (before, after))
        for key in dict.fromkeys([*one, *other]):
            if key != "machine.load_average" and one.get(key) != other.get(key):
                found.append(f"{key}: {one.get(key)} against {other.get(key)}")
    return found + [f"only in one of them: {load.name}" for load in missing]


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Leaves by their dotted names."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    items: dict[str, Any] = {}
    for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
        items |= _flat(inner, f"{name}.{key}")
    return items
