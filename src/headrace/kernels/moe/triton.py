"""The GPU backend: routing in one kernel, tokens sorted by expert, two grouped products. Captured steps may replay it.

Nothing is read back: tiles of an expert are as many as its tokens need, and the grid has room for the worst case.
"""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.moe._triton_grouped import GroupedTuning, launch_combine, launch_grouped
from headrace.kernels.moe._triton_route import launch_route, launch_sort
from headrace.kernels.moe.port import ExpertWeights, Routed, Routing, Stacked
from headrace.kernels.quantise import quantise

__all__ = ["TritonMoe"]


class TritonMoe:
    """A token's result depends on it alone, and by rounding on how many tokens share the step."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """As they are."""
        return weights

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
        """Choose experts."""
        return launch_route(logits, correction, routing)

    def run(self, x: Tensor, routed: Routed, prepared: ExpertWeights) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        num_tokens, top_k = routed.ids.shape
        num_pairs, num_experts = num_tokens * top_k, prepared.gate_up.num_experts
        first_expert = prepared.first_expert
        rows = self.rows_of_tile(num_pairs, num_experts)
        tiles = launch_sort(routed.ids, num_experts=num_experts, first_expert=first_expert, rows=rows)
        factors: Tensor | None = routed.weights.flatten()
        if prepared.weighs_input:
            x, factors = (x.unsqueeze(1) * routed.weights.unsqueeze(2)).to(x.dtype).flatten(0, 1), None
        hidden = launch_grouped(
            quantise(x, prepared.gate_up.form),
            prepared.gate_up,
            tiles,
            num_pairs=num_pairs,
            act_after=prepared.act,
            factors=None,
            out_dtype=prepared.dtype,
            tuning=self.tuning_of(prepared.gate_up, rows, is_gated=prepared.act.is_gated),
        )
        results = launch_grouped(
            quantise(hidden, prepared.down.form),
            prepared.down,
            tiles,
            num_pairs=num_pairs,
            act_after=None,
            factors=factors,
            out_dtype=x.dtype,
            tuning=self.tuning_of(prepared.down, rows, is_gated=False),
        )
        return launch_combine(results, routed.ids, first_expert=first_expert, num_experts=num_experts)

    def tuning_of(self, stacked: Stacked, rows: int, *, is_gated: bool) -> GroupedTuning | None:
        """None: by how many tiles there are as well."""
        return None

    def rows_of_tile(self, num_pairs: int, num_experts: int) -> int:
        return tile_rows(num_pairs, num_experts)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile, by how many an expert has if all have as many; the fastest on an H200."""
    mean = num_pairs / num_experts
    return next((rows for rows, most in ((16, 12), (32, 24), (64, 64)) if mean <= most), 128)
