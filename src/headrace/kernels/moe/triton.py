"""The GPU backend: routing in one kernel, tokens sorted by expert, two grouped products. Captured steps may replay it.

Nothing is read back: tiles of an expert are as many as its tokens need, and the grid has room for the worst case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.moe._triton_grouped import (
    FEW_TILES,
    GroupedTuning,
    Options,
    launch_combine,
    launch_grouped,
    tuned,
)
from headrace.kernels.moe._triton_packed import Packed, PackedTuning, can_pack, launch_packed, pack, tuned_packed
from headrace.kernels.moe._triton_route import Tiles, launch_route, launch_sort
from headrace.kernels.moe.port import ExpertAct, ExpertWeights, Routed, Routing, Stacked
from headrace.kernels.quantise import quantise

__all__ = ["TritonMoe"]


class Prepared(NamedTuple):
    """As `ExpertWeights`."""

    gate_up: Stacked | Packed
    down: Stacked | Packed
    num_experts: int
    act: ExpertAct
    dtype: torch.dtype
    first_expert: int
    weighs_input: bool


class TritonMoe:
    """A token's result depends on it alone, and by rounding on how many tokens share the step."""

    def prepare(self, weights: ExpertWeights) -> Prepared:
        """MXFP4 is repacked where its sizes allow it; others stay as they are."""
        sides = (weights.gate_up, weights.act), (weights.down, None)
        gate_up, down = (pack(side, act) if can_pack(side) else side for side, act in sides)
        return Prepared(
            gate_up,
            down,
            weights.gate_up.num_experts,
            weights.act,
            weights.dtype,
            weights.first_expert,
            weights.weighs_input,
        )

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
        """Choose experts."""
        return launch_route(logits, correction, routing)

    def run(self, x: Tensor, routed: Routed, prepared: Prepared) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        num_pairs, num_experts, first_expert = routed.ids.numel(), prepared.num_experts, prepared.first_expert
        rows = self.rows_of_tile(num_pairs, num_experts)
        tiles = launch_sort(routed.ids, num_experts=num_experts, first_expert=first_expert, rows=rows)
        factors: Tensor | None = routed.weights.flatten()
        dtype = x.dtype
        if prepared.weighs_input:
            x, factors = (x.unsqueeze(1) * routed.weights.unsqueeze(2)).to(dtype).flatten(0, 1), None
        hidden = self.product(x, prepared.gate_up, tiles, num_pairs, act_after=prepared.act, out_dtype=prepared.dtype)
        results = self.product(hidden, prepared.down, tiles, num_pairs, factors=factors, out_dtype=dtype)
        return launch_combine(results, routed.ids, first_expert=first_expert, num_experts=num_experts)

    def product(
        self,
        x: Tensor,
        side: Stacked | Packed,
        tiles: Tiles,
        num_pairs: int,
        *,
        out_dtype: torch.dtype,
        act_after: ExpertAct | None = None,
        factors: Tensor | None = None,
        tuning: GroupedTuning | PackedTuning | None = None,
    ) -> Tensor:
        """Multiply each pair's row with its expert's weight.

        Args:
            x: [tokens, in] or [num_pairs, in].
            act_after: the activation behind a product of gate and up; None is none.
            factors: [num_pairs] float32, what results are multiplied with.
            tuning: None is the measured choice.

        Returns:
            [num_pairs, out], or half as wide behind a gate; rows of pairs in no tile are undefined.
        """
        is_gated, is_few = act_after is not None and act_after.is_gated, self.are_few(tiles)
        options = Options(num_pairs, act_after, factors, out_dtype)
        if isinstance(side, Packed):
            tuning = tuning or tuned_packed(x.dtype, tiles.rows, is_gated=is_gated, is_few=is_few)
            assert isinstance(tuning, PackedTuning)
            return launch_packed(x, side, tiles, options, tuning=tuning)
        tuning = tuning or tuned(side, tiles.rows, is_gated=is_gated, is_few=is_few)
        assert isinstance(tuning, GroupedTuning)
        return launch_grouped(quantise(x, side.form), side, tiles, options, tuning=tuning)

    def rows_of_tile(self, num_pairs: int, num_experts: int) -> int:
        return tile_rows(num_pairs, num_experts)

    def are_few(self, tiles: Tiles) -> bool:
        """So that more programs of fewer columns each keep more processors busy."""
        return tiles.max_tiles <= FEW_TILES


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile, by how many an expert has if all have as many; the fastest on an H200."""
    mean = num_pairs / num_experts
    return next((rows for rows, most in ((16, 12), (32, 24), (64, 64)) if mean <= most), 128)
