"""Counter-based noise: a uniform number is a pure function of (seed, position, purpose).

So a seeded request draws the same numbers in any batch, in any order, on any rank and device: all
arithmetic that decides the bits is on 64-bit integers, which wrap the same way everywhere.
"""

from __future__ import annotations

from torch import Tensor

from headrace.seeds import GOLDEN, MULTIPLIERS, SHIFTS, as_int64

__all__ = ["row_noise"]

UNIFORM_BITS = 52


def row_noise(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Uniform float64 numbers in the open interval (0, 1).

    Args:
        seeds: int64 [rows], 64-bit patterns.
        positions: int64 [rows], length of the sequence before the token that is drawn.
    """
    stream = mix(seeds + as_int64(GOLDEN * (purpose + 1)))
    bits = mix(stream + (positions + 1) * as_int64(GOLDEN))
    # 52 bits and a half: one bit more, and the largest value would round to 1.0
    return (_shift_right(bits, 64 - UNIFORM_BITS).double() + 0.5) * 2.0**-UNIFORM_BITS


def mix(values: Tensor) -> Tensor:
    """`headrace.seeds.mix` on an int64 tensor of any shape, which holds the 64-bit patterns."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS):
        values = (values ^ _shift_right(values, shift)) * as_int64(multiplier)
    return values ^ _shift_right(values, SHIFTS[2])


def _shift_right(values: Tensor, count: int) -> Tensor:
    """Without the sign: torch's own shift of int64 copies the sign bit in."""
    return (values >> count) & ((1 << (64 - count)) - 1)
