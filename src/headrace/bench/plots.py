"""The figures of a report, drawn with matplotlib (the extra `bench`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.report import LATENCIES, Point, Report, Spread

__all__ = ["draw", "png", "require_matplotlib", "save_plots"]

SIZE_INCHES = (7.0, 4.2)
DPI = 130
COLOURS = ("#1f6feb", "#d1570f", "#2d8a4e", "#8250df", "#b8336a", "#57606a", "#0b7285", "#9a6700")
SHARES = [number / 100 for number in range(101)]

Paint = Callable[[Any, Any], None]
"""Draws what it is given, a report for instance, into axes."""


def require_matplotlib() -> None:
    """Raises ValueError: it isn't installed."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'headrace[bench]'") from None


def draw(report: Report) -> dict[str, bytes]:
    """PNG files by name: one of the latencies of each run, and for a sweep its curves."""
    figures: dict[str, Paint] = {"latency": _latencies if len(report.points) == 1 else _bars}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        if any(point.latency.get(name) for point in report.points):
            figures[f"{name.removesuffix('_s')}_cdf"] = _cdf(name)
    if len(report.points) > 1:
        figures["throughput"] = _throughput
        figures["pareto"] = _pareto
        if any(point.goodput is not None for point in report.points):
            figures["goodput"] = _goodput
    return {name: png(paint, report) for name, paint in figures.items()}


def save_plots(report: Report, folder: Path) -> list[Path]:
    """Write the figures as PNG files into `folder`, which is made if it isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, data in draw(report).items():
        paths.append(folder / f"{name}.png")
        paths[-1].write_bytes(data)
    return paths


def png(paint: Paint, subject: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_prop_cycle(color=COLOURS)
    paint(axes, subject)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _latencies(axes: Any, report: Report) -> None:
    """The quantiles of every latency of one run."""
    for name in LATENCIES:
        spread = report.points[0].latency.get(name)
        if spread is not None and spread.max > 0:
            axes.plot([value * 1000 for value in spread.curve], SHARES, label=name.removesuffix("_s").upper())
    axes.set(xscale="log", xlabel="milliseconds", ylabel="share of requests", title="Latencies", ylim=(0, 1.02))
    if axes.lines:  # none where every request failed
        axes.legend(frameon=False)


def _bars(axes: Any, report: Report) -> None:
    """Median and P99 of time to the first token and of a token after it, by load."""
    names = [point.load.name for point in report.points]
    for name in ("ttft_s", "tpot_s"):
        for quantile, style in (("p50", "o-"), ("p99", "^--")):
            values = [_value(point, name, quantile) for point in report.points]
            axes.plot(names, values, style, label=f"{name.removesuffix('_s').upper()} {quantile}")
    axes.set(yscale="log", ylabel="milliseconds", title="Latency by load")
    _slanted(axes, names)
    axes.legend(frameon=False)


def _cdf(name: str) -> Paint:
    def paint(axes: Any, report: Report) -> None:
        for point in report.points:
            spread = point.latency.get(name)
            if spread is not None:
                axes.plot([value * 1000 for value in spread.curve], SHARES, label=point.load.name)
        limit = None if report.slo is None else report.slo.limits.get(name)
        if limit is not None:
            axes.axvline(limit * 1000, color="#57606a", linestyle=":", label="SLO")
        axes.set(xlabel="milliseconds", ylabel="share of requests", title=_title(name), ylim=(0, 1.02))
        axes.legend(frameon=False, fontsize=8)

    return paint


def _throughput(axes: Any, report: Report) -> None:
    names = [point.load.name for point in report.points]
    axes.plot(names, [point.result.output_tokens_per_s for point in report.points], "o-", label="output tokens/s")
    axes.set(ylabel="output tokens/s", title="Throughput by load", ylim=(0, None))
    _slanted(axes, names)


def _pareto(axes: Any, report: Report) -> None:
    """What each user gets against what each GPU gives."""
    points = [point for point in report.points if point.result.decode_tokens_per_s_per_user is not None]
    axes.plot(
        [point.result.decode_tokens_per_s_per_user for point in points],
        [point.result.output_tokens_per_s_per_gpu for point in points],
        "o-",
    )
    for point in points:
        at = (point.result.decode_tokens_per_s_per_user, point.result.output_tokens_per_s_per_gpu)
        axes.annotate(point.load.name, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    right = max((point.result.decode_tokens_per_s_per_user or 0 for point in points), default=0)
    top = max((point.result.output_tokens_per_s_per_gpu for point in points), default=0)
    axes.set(xlabel="tokens/s/user after the first token", ylabel="output tokens/s/GPU", title="Throughput and speed")
    axes.set(xlim=(0, 1.25 * right or 1), ylim=(0, 1.1 * top or 1))  # names stand to the right of the points


def _goodput(axes: Any, report: Report) -> None:
    points = [point for point in report.points if point.goodput is not None]
    names = [point.load.name for point in points]
    axes.plot(names, [point.result.requests_per_s for point in points], "^--", label="all done")
    axes.plot(names, [point.goodput.requests_per_s for point in points if point.goodput], "o-", label="within the SLO")
    axes.set(ylabel="requests/s", title="Goodput by load", ylim=(0, None))
    _slanted(axes, names)
    axes.legend(frameon=False)


def _title(name: str) -> str:
    meaning = LATENCIES[name]
    return meaning[0].upper() + meaning[1:]


def _slanted(axes: Any, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)


def _value(point: Point, name: str, quantile: str) -> float:
    spread = point.latency.get(name)
    return getattr(spread, quantile) * 1000 if isinstance(spread, Spread) else float("nan")
