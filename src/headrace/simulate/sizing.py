"""How many instances an SLO needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.bench.report import Slo
from headrace.simulate.fleet import Outcome


@dataclass(frozen=True, slots=True)
class Trial:
    num_instances: int
    share: float
    """Of the requests that kept the SLO."""


def fewest_instances(
    simulated: Callable[[int], Outcome], slo: Slo, *, share: float, most: int
) -> tuple[int, list[Trial]]:
    """The fewest instances with which `share` of the requests keep every limit, and all that was tried.

    Doubles until enough, then halves the gap: more instances are taken to be never worse.

    Raises:
        ValueError: not even `most` are enough, or more of them change nothing any more.
    """
    trials: list[Trial] = []

    def kept(count: int) -> bool:
        trials.append(Trial(count, float(slo.is_met(simulated(count).record).mean())))
        return trials[-1].share >= share

    low, high = 0, 1  # `low` are too few
    while not kept(high):
        if high >= most:
            raise ValueError(f"--slo: {_best(trials)}, and --max_instances is {most}: raise it or the limits")
        if len(trials) > 2 and trials[-1].share == trials[-2].share == trials[-3].share:
            raise ValueError(
                f"--slo: {_best(trials)}, and more change nothing: raise the limits, or use faster devices"
            )
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(middle) else (middle, high)
    return high, trials


def _best(trials: list[Trial]) -> str:
    best = max(trials, key=lambda trial: trial.share)
    count = "1 instance keeps" if best.num_instances == 1 else f"{best.num_instances} instances keep"
    return f"{count} it for {best.share:.1%} of the requests"
