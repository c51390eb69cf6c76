"""Seeds of the sampling noise, as plain integers: what the control half needs of it. No torch.

A seed is a 64-bit key. The device half mixes it with a position and a purpose (`sampling/noise.py`).
Source of the mixing function: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
"""

from __future__ import annotations

import secrets

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: the step between the states of neighbouring counters."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)

_CHILDREN = 0x5851F42D4C957F2D
"""Keeps the keys of choices apart from the keys that the noise derives from the same seed."""


def mix(value: int) -> int:
    """A bijection of 64-bit values in which every bit of the result depends on every bit of `value`."""
    value &= MASK
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS):
        value = (value ^ (value >> shift)) * multiplier & MASK
    return value ^ (value >> SHIFTS[2])


def child_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with n > 1, in 0 .. 2**64 - 1; choice 0 keeps the caller's seed."""
    assert index >= 0
    if index == 0:
        return seed & MASK
    return mix((seed ^ _CHILDREN) + GOLDEN * index)


def random_seed() -> int:
    """A seed for a request that names none: differs between requests and between restarts."""
    return secrets.randbits(64)


def as_int64(value: int) -> int:
    """The same 64 bits as a signed integer, as tensors hold them."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
