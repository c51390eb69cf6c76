"""Whether two configurations differ on the same items: intervals and tests for paired values.

- Yes-or-no values (exact match, accuracy): McNemar's exact test, two-sided binomial on the items that changed
  (McNemar 1947), with a paired bootstrap interval of the difference.
- Everything else (log-probabilities, scores): the paired bootstrap alone (Efron 1979, percentile interval).

Both verdicts are at the level 1 - CONFIDENCE; "no difference shown" does not mean that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["CONFIDENCE", "Comparison", "compare_means", "compare_perplexities", "mcnemar", "mean_interval"]

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
MIN_ITEMS = 6
"""With fewer, chance alone moves all of them one way more often than 1 - CONFIDENCE (2 in 2^items): no verdict."""
BATCH = 250
"""Resamples drawn at a time, to bound memory."""
Verdict = Literal["better", "worse", "no difference shown"]
Floats = NDArray[np.float64]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """B against A on one metric."""

    metric: str
    a: float
    b: float
    difference: float
    """B - A; of perplexities B / A - 1."""
    low: float
    high: float
    """The difference's interval at CONFIDENCE."""
    method: str
    p_value: float | None = None
    num_items: int
    verdict: Verdict


def compare_means(
    metric: str, a: Sequence[float], b: Sequence[float], *, more_is_better: bool = True, seed: int = 0
) -> Comparison:
    """The means of a value that both configurations have for the same items, in the same order."""
    before, after = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert before.shape == after.shape and before.size
    differences = after - before
    low, high = _interval(differences, np.ones_like(differences), seed)
    is_binary = bool(np.isin(np.concatenate([before, after]), (0.0, 1.0)).all())
    if is_binary:
        p_value: float | None = mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
        has_changed = p_value is not None and p_value < 1 - CONFIDENCE
        method = "McNemar's exact test; interval by paired bootstrap over items"
    else:
        has_changed = not low <= 0 <= high and before.size >= MIN_ITEMS
        p_value, method = None, "paired bootstrap over items" + _few(before.size)
    difference = float(differences.mean())
    verdict: Verdict = "no difference shown"
    if has_changed:
        verdict = "better" if (difference > 0) is more_is_better else "worse"
    return Comparison(
        metric=metric, a=float(before.mean()), b=float(after.mean()), difference=difference, low=low, high=high,
        method=method, p_value=p_value, num_items=before.size, verdict=verdict,
    )  # fmt: skip


def compare_perplexities(a: Sequence[float], b: Sequence[float], counts: Sequence[int], *, seed: int = 0) -> Comparison:
    """Log-probability sums of the same windows; the difference is B / A - 1, lower is better."""
    before, after, weights = (np.asarray(values, np.float64) for values in (a, b, counts))
    assert before.shape == after.shape == weights.shape
    low, high = (math.expm1(value) for value in _interval(before - after, weights, seed))
    total = weights.sum()
    verdict: Verdict = "no difference shown"
    if before.size >= MIN_ITEMS:
        verdict = "worse" if low > 0 else "better" if high < 0 else verdict
    return Comparison(
        metric="perplexity",
        a=math.exp(-before.sum() / total),
        b=math.exp(-after.sum() / total),
        difference=math.expm1((before.sum() - after.sum()) / total),
        low=low,
        high=high,
        method="paired bootstrap over windows" + _few(before.size),
        num_items=before.size,
        verdict=verdict,
    )


def _few(num_items: int) -> str:
    return f" (fewer than {MIN_ITEMS}: too few for a verdict)" if num_items < MIN_ITEMS else ""


def mcnemar(num_gained: int, num_lost: int) -> float:
    """The exact two-sided p-value that gains and losses are equally likely."""
    total = num_gained + num_lost
    tail = sum(math.comb(total, count) for count in range(min(num_gained, num_lost) + 1))
    return min(1.0, 2 * tail / 2**total)


def mean_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of a mean at CONFIDENCE."""
    found = np.asarray(values, np.float64)
    return _interval(found, np.ones_like(found), seed)


def _interval(sums: Floats, weights: Floats, seed: int) -> tuple[float, float]:
    """Percentile interval of sum(sums) / sum(weights) over resampled items."""
    rng = np.random.default_rng(seed)
    means: list[Floats] = []
    for _ in range(NUM_RESAMPLES // BATCH):
        drawn = rng.multinomial(sums.size, np.full(sums.size, 1 / sums.size), size=BATCH)  # [resamples, items]
        means.append((drawn @ sums) / (drawn @ weights))
    low, high = np.quantile(np.concatenate(means), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)).tolist()
    return low, high
