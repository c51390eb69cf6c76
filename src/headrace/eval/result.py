"""The result of an evaluation: JSON with a schema version, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.eval.compare import CONFIDENCE, Comparison

__all__ = ["SCHEMA_VERSION", "EvalResult", "Metric", "Side", "as_text", "write_result"]

SCHEMA_VERSION = 1


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one configuration."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    """Its bootstrap interval at CONFIDENCE, where there is one."""
    num_items: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration and what came of it."""

    model: str
    settings: dict[str, Any]
    """That differ from the defaults."""
    metrics: list[Metric]
    items: list[dict[str, Any]] = []


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of one configuration, or of two (A, then B)."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["perplexity", "exact-match", "lm-eval"]
    date: str
    versions: dict[str, str]
    task: dict[str, Any]
    """What was asked: file, method and sizes."""
    confidence: float = CONFIDENCE
    sides: list[Side]
    comparisons: list[Comparison] = []


def write_result(result: EvalResult, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def as_text(result: EvalResult) -> str:
    """For people."""
    lines: list[str] = []
    for name, side in zip(("A", "B"), result.sides):
        lines.append(f"{name + ': ' if len(result.sides) > 1 else ''}{side.model} {_settings(side.settings)}".rstrip())
        lines += [f"  {_metric(metric)}" for metric in side.metrics]
    if result.comparisons:
        lines += ["", f"B against A, at {CONFIDENCE:.0%}:", *_comparisons(result.comparisons)]
    return "\n".join(lines)


def _settings(settings: dict[str, Any]) -> str:
    shown = {name: value for name, value in settings.items() if name != "model"}
    return f"({', '.join(f'{name}: {value}' for name, value in shown.items())})" if shown else ""


def _metric(metric: Metric) -> str:
    interval = "" if metric.low is None else f"  [{metric.low:.4f}, {metric.high:.4f}]"
    return f"{metric.name:<28}{metric.value:>12.4f}{interval}  ({_count(metric.num_items, metric.name)})"


def _count(number: int, metric: str = "") -> str:
    noun = {"perplexity": "token", "bits_per_byte": "byte"}.get(metric, "item")
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _comparisons(found: Sequence[Comparison]) -> list[str]:
    lines: list[str] = []
    for each in found:
        relative = each.metric == "perplexity"
        shown = [f"{value:+.3%}" if relative else f"{value:+.4f}" for value in (each.difference, each.low, each.high)]
        p_value = "" if each.p_value is None else f", p = {each.p_value:.4f}"
        lines.append(f"  {each.metric}: {each.verdict}: {shown[0]} [{shown[1]}, {shown[2]}]{p_value}")
        lines.append(f"    {each.method}; {_count(each.num_items)}")
    return lines
