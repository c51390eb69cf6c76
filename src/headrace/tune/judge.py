"""What a run is worth: the tokens per second of the highest load at which the limits are kept."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.bench.report import Point, Slo, Spread


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The most output tokens per second such that this share of the requests keeps each limit by itself."""

    slo: Slo
    quantile: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the best load of a run; times at the goal's quantile."""

    load: str
    output_tokens_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    excess: float
    """The largest of time / limit; up to 1 all limits are kept. 0 without limits."""
    num_failed: int = 0

    @property
    def keeps(self) -> bool:
        return self.excess <= 1 and not self.num_failed

    @property
    def rank(self) -> tuple[bool, float]:
        """Larger is better."""
        return self.keeps, self.output_tokens_per_s if self.keeps else -self.excess


def judge(points: Sequence[Point], goal: Goal) -> Figures:
    return max((figures_of(point, goal) for point in points), key=lambda figures: figures.rank)


def figures_of(point: Point, goal: Goal) -> Figures:
    times = {name: quantile_of(point.latency.get(name), goal.quantile) for name in ("ttft_s", "tpot_s", "e2e_s")}
    over = [(times[name] or 0.0) / limit for name, limit in goal.slo.limits.items()]
    return Figures(
        load=point.load.name,
        output_tokens_per_s=point.result.output_tokens_per_s,
        ttft_s=times["ttft_s"],
        tpot_s=times["tpot_s"],
        excess=max(over, default=0.0),
        num_failed=point.result.num_failed,
    )


def quantile_of(spread: Spread | None, quantile: float) -> float | None:
    return None if spread is None else spread.curve[round(quantile * (len(spread.curve) - 1))]


def gain(after: Figures, before: Figures) -> float:
    """By how much `after` is better, as a share; by how much nearer to the limits where neither keeps them."""
    if after.keeps and before.keeps:
        return after.output_tokens_per_s / before.output_tokens_per_s - 1
    if after.keeps != before.keeps:
        return 1.0 if after.keeps else -1.0
    return before.excess / after.excess - 1 if after.excess else 0.0
