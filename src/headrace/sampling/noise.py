"""What noise is drawn for; the numbers themselves are `headrace.kernels.row_noise`."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from headrace.kernels.row_noise import mix as mix
from headrace.kernels.row_noise import row_noise


class Purpose(IntEnum):
    """What a number is drawn for. Each purpose is a stream of its own at every position."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Uniform float64 numbers in the open interval (0, 1); arguments as in `row_noise`."""
    return row_noise(seeds, positions, purpose)
