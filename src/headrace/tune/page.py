"""What a search found, for people: a picture of all that was measured, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, cast

from headrace.bench.page import document, facts_html, figures_html, table_html
from headrace.bench.report import Point
from headrace.bench.table import slo_text
from headrace.tune.judge import Figures, Goal, figures_of
from headrace.tune.search import text_of
from headrace.tune.store import AGAIN, Journal, Trial

__all__ = ["Measured", "as_page", "front_of", "paint"]

HOW = {"engine": "", "server": ", through a server"}
"""By `Trial.through`."""
GREY, BLUE, ORANGE = "#8c959f", "#1f6feb", "#d1570f"


@dataclass(frozen=True, slots=True)
class Measured:
    """One load of one trial."""

    trial: Trial
    point: Point
    keeps: bool
    is_best: bool
    """Of the settings that were chosen."""

    @property
    def place(self) -> tuple[float, float]:
        """(tokens/s of a user, output tokens/s of a GPU)"""
        result = self.point.result
        return result.decode_tokens_per_s_per_user or 0.0, result.output_tokens_per_s_per_gpu


def measured_of(journal: Journal, points: Sequence[tuple[Trial, Sequence[Point]]], goal: Goal) -> list[Measured]:
    return [
        Measured(trial, point, figures_of(point, goal).keeps, trial.number == journal.best)
        for trial, each in points
        for point in each
    ]


def front_of(measured: Sequence[Measured]) -> list[Measured]:
    """Those that nothing beats in both, from the fastest for a user to the most tokens (Pareto's front)."""
    front: list[Measured] = []
    for each in sorted(measured, key=lambda one: one.place, reverse=True):
        if not front or each.place[1] > front[-1].place[1]:
            front.append(each)
    return front


def paint(axes: Any, measured: Sequence[Measured]) -> None:
    """A `bench.plots.Paint`."""
    alone = [one for one in measured if one.trial.through == "engine"]  # a server's figures are others
    for colour, label, chosen in (
        (GREY, "over a limit", [one for one in alone if not one.keeps]),
        (BLUE, "within the limits", [one for one in alone if one.keeps]),
    ):
        if chosen:
            axes.plot(*zip(*(one.place for one in chosen)), "o", color=colour, label=label)
    front = front_of(alone)
    axes.plot(*zip(*(one.place for one in front)), "-", color=GREY, linewidth=1, label="front", zorder=1)
    best = [one for one in measured if one.is_best]
    label = f"chosen settings{HOW[best[0].trial.through]}" if best else ""
    axes.plot(*zip(*(one.place for one in best)), "*", color=ORANGE, markersize=14, label=label)
    for one in front:
        if any(one.trial.settings == each.trial.settings and one.point.load == each.point.load
               for each in front[: front.index(one)]):  # fmt: skip
            continue  # measured twice
        label = f"{one.trial.name}\n{one.point.load.name}"
        axes.annotate(label, one.place, xytext=(6, 4), textcoords="offset points", fontsize=6)
    right, top = (max(one.place[axis] for one in measured) for axis in (0, 1))
    axes.set(xlabel="tokens/s/user after the first token", ylabel="output tokens/s/GPU", title="All that was measured")
    axes.set(xlim=(0, 1.6 * right or 1), ylim=(0, 1.25 * top or 1))  # names stand to the right of the points
    axes.legend(frameon=False, fontsize=8)


def as_page(journal: Journal, goal: Goal, best: Trial, *, yaml: str, pictures: dict[str, bytes]) -> str:
    title = f"headrace tune: {journal.asked['model']}"
    assert best.measured is not None
    facts = [
        ("limits", f"{slo_text(goal.slo)} for {goal.quantile:.0%} of the requests each" if goal.slo.limits else "none"),
        ("chosen", best.name),
        ("measured", f"{text_of(best.measured)}{HOW[best.through]}"),
        *((name, _plain(value)) for name, value in journal.asked.items() if name not in ("model", "goal")),
    ]
    head = ("trial", "settings", "outcome", "tok/s", "predicted", "TTFT ms", "TPOT ms", "at", "reason")
    parts = [
        f"<h1>{escape(title)}</h1>",
        facts_html(facts),
        "<h2>Configuration</h2>",
        f"<pre>{escape(yaml)}</pre>",
        *figures_html(pictures),
        "<h2>Trials</h2>",
        table_html([head, *(_row(trial) for trial in journal.trials)], texts=(1, 8)),
        f'<p class="note">Times at the {goal.quantile:.0%} quantile.</p>',
    ]
    return document(title, parts)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return ", ".join(f"{name} {_plain(each)}" for name, each in fields.items())
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _row(trial: Trial) -> tuple[str, ...]:
    measured, predicted = trial.measured, trial.predicted
    return (
        str(trial.number),
        f"{trial.name}{HOW[trial.through] or ', again'}" if trial.knob == AGAIN else trial.name,
        trial.outcome,
        "" if measured is None else f"{measured.output_tokens_per_s:,.1f}",
        "" if predicted is None else f"{predicted.output_tokens_per_s:,.1f}",
        *_times(measured or predicted),
        trial.reason,
    )


def _times(figures: Figures | None) -> tuple[str, str, str]:
    if figures is None:
        return "", "", ""
    ttft, tpot = (("" if each is None else f"{each * 1000:,.0f}") for each in (figures.ttft_s, figures.tpot_s))
    return ttft, tpot, figures.load
