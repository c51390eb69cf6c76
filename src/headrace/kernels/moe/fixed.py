"""The GPU backend for `deterministic: true`: tiles of one size, so that a token's sums have one order."""

from __future__ import annotations

from headrace.kernels.moe._triton_route import Tiles
from headrace.kernels.moe.triton import TritonMoe

__all__ = ["FixedMoe"]


class FixedMoe(TritonMoe):
    """A token's result has the same bits beside any others."""

    def rows_of_tile(self, num_pairs: int, num_experts: int) -> int:
        """Always those of few tokens."""
        return 16

    def are_few(self, tiles: Tiles) -> bool:
        """The same for few tiles and for many."""
        return False
