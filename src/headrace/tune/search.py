"""The search: one knob after another, each candidate predicted first and measured only if it may be better."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.report import Point, Report
from headrace.tune.judge import Figures, Goal, gain, judge
from headrace.tune.knobs import Asked, Knob
from headrace.tune.store import AGAIN, Outcome, Store, Through, Trial

SAME = 0.01
"""A smaller predicted difference is none."""
WORSE = 0.10
"""Predicted to lose more than this: not measured. The simulator's own error is about that."""
BETTER = 0.03
"""A measured gain has to be larger, or the settings stay as they are."""
CONFIRMING = 2
"""As many trials take the time of a second measurement: of a server, that is, in several runs."""
MAX_CONFIRMED = 3
"""Settings that are measured a second time, the first ones left aside."""

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How settings are tried."""

    measure: Callable[[Settings], Report]
    """Raises ValueError, MemoryError or RuntimeError: they don't work."""
    confirm: Callable[[Settings], Report]
    """As they will be used; raises the same. What it says is what the user is told."""
    confirms: Through
    """What `confirm` measures."""
    predict: Callable[[Settings, Sequence[Report]], Sequence[Point]]
    """From the reports so far. Raises ValueError or MemoryError: they can't work."""
    current: Callable[[str], Any]
    """What the user's settings have at a path."""


class Search:
    """`run` once. What it did is in the store."""

    def __init__(
        self,
        bench: Bench,
        store: Store,
        goal: Goal,
        *,
        budget_s: float,
        max_per_knob: int,
        say: Callable[[str], object],
    ) -> None:
        self._bench = bench
        self._store = store
        self._goal = goal
        self._began_s = time.monotonic()
        self._budget_s = budget_s
        self._max_per_knob = max_per_knob
        self._say = say
        self._reports: list[Report] = []
        self._longest_s = 0.0

    def run(self, knobs: Sequence[Knob], asked: Asked) -> Trial:
        """The best trial; its settings may keep the limits or only come nearest.

        Raises:
            ValueError, MemoryError, RuntimeError: the user's settings don't work as they are.
        """
        first = best = self._measured("", {}, None)
        for knob in knobs:
            best = self._turn(knob, best, asked)
        best = self._confirmed(best, first)
        self._store.journal.best = best.number
        self._store.save()
        return best

    def _confirmed(self, best: Trial, first: Trial) -> Trial:
        """The settings to use, with figures that were measured as they will be used.

        The best of many measured values is partly luck, and a server is not an engine in a process of its own. So the
        first settings and the best ones are measured again, and what the second time says counts; where it says that
        the best ones don't keep the limits, the next best ones are asked. Without time for it, the best as it is.
        """
        words = "through a server" if self._bench.confirms == "server" else "again"
        self._say(f"{words}: does it hold?")
        if self._has_no_time(CONFIRMING * (1 + (best is not first))):
            self._say(f"  not measured {words}: the budget of {self._budget_s:.0f} s is spent")
            return best
        base = found = self._again(first)
        if base is None or found is None:
            return best
        assert base.measured is not None
        for number, trial in enumerate(self._better_than(first)[:MAX_CONFIRMED]):
            if number and self._has_no_time(CONFIRMING):
                break
            after = self._again(trial)
            if after is None:
                continue
            assert after.measured is not None and found.measured is not None
            if gain(after.measured, found.measured) > 0:
                found = after
            if after.measured.keeps:
                break
        assert found.measured is not None
        if found is not base:
            self._say(f"  yes: {gain(found.measured, base.measured):+.0%} over the settings as given")
        elif best is not first:
            self._say("  no: the settings stay as given")
        return found

    def _again(self, trial: Trial) -> Trial | None:
        """None: they don't work as they would be used."""
        try:
            return self._measured(AGAIN, trial.settings, None)
        except (ValueError, MemoryError, RuntimeError) as error:
            self._note(AGAIN, trial.settings, "failed", str(error))
            return None

    def _better_than(self, first: Trial) -> list[Trial]:
        """What was measured to be better by more than noise, the best first."""
        assert first.measured is not None
        found = [
            (trial.measured.rank, -trial.number, trial)
            for trial in self._store.journal.trials
            if trial.measured is not None and trial.settings and gain(trial.measured, first.measured) > BETTER
        ]
        return [trial for *_, trial in sorted(found, key=lambda each: each[:2], reverse=True)]

    def _has_no_time(self, num_trials: int) -> bool:
        return time.monotonic() - self._began_s + num_trials * self._longest_s > self._budget_s

    def _turn(self, knob: Knob, best: Trial, asked: Asked) -> Trial:
        assert best.measured is not None
        self._say(f"{knob.path}: {knob.question}?")
        now = best.settings.get(knob.path, self._bench.current(knob.path))
        base = self._predicted(best.settings)
        assert not isinstance(base, str), base
        wanted: list[tuple[float, Settings, Figures]] = []
        for value in knob.values(asked):
            if value == now:
                continue
            settings = {**best.settings, knob.path: value}
            figures = self._predicted(settings)
            if isinstance(figures, str):
                self._note(knob.path, settings, "impossible", figures)
                continue
            share = gain(figures, base)
            if abs(share) < SAME:
                self._note(knob.path, settings, "pruned", "predicted to change nothing", figures)
            elif share < -WORSE:
                self._note(knob.path, settings, "pruned", f"predicted to be {-share:.0%} worse", figures)
            else:
                wanted.append((share, settings, figures))
        wanted.sort(key=lambda each: each[0], reverse=True)
        for rank, (_, settings, figures) in enumerate(wanted):
            if rank >= self._max_per_knob:
                self._note(knob.path, settings, "pruned", "others are predicted to be better", figures)
                continue
            best = self._try(knob, settings, figures, best)
        return best

    def _try(self, knob: Knob, settings: Settings, predicted: Figures, best: Trial) -> Trial:
        assert best.measured is not None
        if self._store.known(settings) is None and self._has_no_time(1 + 2 * CONFIRMING):
            self._note(knob.path, settings, "no time", f"the budget of {self._budget_s:.0f} s is spent", predicted)
            return best
        try:
            trial = self._measured(knob.path, settings, predicted)
        except (ValueError, MemoryError, RuntimeError) as error:
            self._note(knob.path, settings, "failed", str(error), predicted)
            return best
        assert trial.measured is not None
        return trial if gain(trial.measured, best.measured) > BETTER else best

    def _measured(self, knob: str, settings: Settings, predicted: Figures | None) -> Trial:
        number, began_s = len(self._store.journal.trials), time.monotonic()
        known = self._store.known(settings, is_again=knob == AGAIN)
        if known is not None:
            report, name, seconds = self._store.report(known), known.report, known.seconds
        else:
            report = (self._bench.confirm if knob == AGAIN else self._bench.measure)(settings)
            name, seconds = self._store.keep(report, number), time.monotonic() - began_s
            self._longest_s = max(self._longest_s, seconds / (CONFIRMING if knob == AGAIN else 1))
        if knob != AGAIN:
            self._reports.append(report)
        figures = judge(report.points, self._goal)
        trial = Trial(
            number=number, knob=knob, settings=settings, outcome="measured", predicted=predicted, measured=figures,
            through=self._bench.confirms if knob == AGAIN else "engine", report=name, seconds=seconds,
        )  # fmt: skip
        self._store.add(trial)
        self._tell(trial, "" if known is None else " (from an earlier run)")
        return trial

    def _predicted(self, settings: Settings) -> Figures | str:
        """Or why they can't work."""
        try:
            return judge(self._bench.predict(settings, self._reports), self._goal)
        except (ValueError, MemoryError, NotImplementedError) as error:
            return str(error)

    def _note(
        self, knob: str, settings: Settings, outcome: Outcome, reason: str, predicted: Figures | None = None
    ) -> None:
        trial = Trial(
            number=len(self._store.journal.trials), knob=knob, settings=settings, outcome=outcome, reason=reason,
            predicted=predicted,
        )  # fmt: skip
        self._store.add(trial)
        self._tell(trial, "")

    def _tell(self, trial: Trial, note: str) -> None:
        spent_s = time.monotonic() - self._began_s
        figures = trial.measured
        text = f"{trial.outcome}: {trial.reason}" if figures is None else text_of(figures)
        self._say(f"  [{spent_s:4.0f} s] {trial.name}: {text}{note}")


def text_of(figures: Figures) -> str:
    times = [
        f"{name} {value * 1000:,.0f} ms"
        for name, value in (("TTFT", figures.ttft_s), ("TPOT", figures.tpot_s))
        if value is not None
    ]
    verdict = "within the limits" if figures.keeps else f"{figures.excess:.2f} times a limit"
    if figures.num_failed:
        verdict = f"{figures.num_failed} requests failed"
    return f"{figures.output_tokens_per_s:,.1f} output tokens/s at {figures.load}, {', '.join(times)}, {verdict}"
