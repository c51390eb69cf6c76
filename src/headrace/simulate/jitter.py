"""What steps vary by beyond what they compute, as it was measured: the same for a step however it is worked out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_QUANTILES = 64
SHIFT = np.uint64(58)
"""Leaves as many bits of 64 as name a quantile."""
QUANTILES = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES


def spread_of(ratios: Floats) -> tuple[float, ...]:
    """Quantiles of measured / modelled; drawn evenly, they have its distribution and about its mean."""
    return tuple(np.quantile(ratios, QUANTILES).tolist())


class Jitter:
    """Factors on the time of the steps of one engine, by the number of the step. No spread is a factor of 1."""

    def __init__(self, spread: Sequence[float], *, seed: int) -> None:
        self._spread = np.array(spread or (1.0,), np.float64)
        self._seed = np.uint64(seed)

    def factor(self, number: int) -> float:
        """Of one step."""
        return 1.0 if len(self._spread) == 1 else float(self.factors(number, 1)[0])

    def factors(self, first: int, count: int) -> Floats:
        """Of the steps from number `first` on."""
        if len(self._spread) == 1:
            return np.ones(count)
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return self._spread[(_mixed(_mixed(numbers) + self._seed) >> SHIFT).astype(np.int64)]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits that look random: SplitMix64 (Steele, Lea, Flood, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
