"""The oracle backend: plain torch on any device."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.moe._twin import route_twin, run_twin
from headrace.kernels.moe.port import ExpertWeights, Routed, Routing

__all__ = ["TorchMoe"]


class TorchMoe:
    """Slow and obvious: one expert after another, in float32."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """As they are."""
        return weights

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
        """Choose experts."""
        return route_twin(logits, correction, routing)

    def run(self, x: Tensor, routed: Routed, prepared: ExpertWeights) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return run_twin(x, routed, prepared)
