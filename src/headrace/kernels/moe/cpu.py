"""The CPU backend: tokens grouped by expert, and the compiled product where a weight is plain.

Quantised weights stay as they are in memory; an expert's are widened while its tokens are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.act_mul import act_mul
from headrace.kernels.moe._twin import activate, product_twin, route_twin
from headrace.kernels.moe.port import ExpertAct, ExpertWeights, Routed, Routing, Stacked
from headrace.kernels.packed_linear import Packed, can_pack, pack, packed_linear

__all__ = ["CpuMoe"]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One product's plain weights, packed by expert, and their biases in float32."""

    experts: tuple[Packed, ...]
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """A layer's experts as `run` takes them."""

    gate_up: PackedExperts | Stacked
    down: PackedExperts | Stacked
    act: ExpertAct
    dtype: torch.dtype
    first_expert: int
    weighs_input: bool

    @property
    def size_bytes(self) -> int:
        return sum(
            part.size_bytes
            if isinstance(part, Stacked)
            else sum(expert.data.nbytes for expert in part.experts) + (0 if part.bias is None else part.bias.nbytes)
            for part in (self.gate_up, self.down)
        )


class CpuMoe:
    """With plain weights a token's result has the same bits in any batch."""

    def prepare(self, weights: ExpertWeights) -> CpuExperts:
        """Plain weights are packed for the compiled product, where there is one."""
        return CpuExperts(
            _packed(weights.gate_up),
            _packed(weights.down),
            weights.act,
            weights.dtype,
            weights.first_expert,
            weights.weighs_input,
        )

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
        """Choose experts."""
        return route_twin(logits, correction, routing)

    def run(self, x: Tensor, routed: Routed, prepared: CpuExperts) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        num_tokens, top_k = routed.ids.shape
        flat = routed.ids.flatten().long()
        factors = routed.weights.flatten().unsqueeze(1)
        order = torch.argsort(flat, stable=True)
        used, counts = torch.unique_consecutive(flat[order], return_counts=True)
        num_experts = _num_experts(prepared.gate_up)
        results = torch.zeros((flat.shape[0], x.shape[1]), dtype=torch.float32)
        for global_id, pairs in zip(used.tolist(), order.split(counts.tolist())):
            expert = global_id - prepared.first_expert
            if not 0 <= expert < num_experts:
                continue
            rows = x[pairs // top_k]
            if prepared.weighs_input:
                rows = (rows.float() * factors[pairs]).to(x.dtype)
            hidden = _activated(_product(rows, prepared.gate_up, expert).to(prepared.dtype), prepared.act)
            result = _product(hidden, prepared.down, expert)
            results[pairs] = result if prepared.weighs_input else result * factors[pairs]
        by_choice = results.unflatten(0, (num_tokens, top_k))
        total = by_choice[:, 0].clone()  # one after another: a reduction's order may depend on the shape
        for choice in range(1, top_k):
            total += by_choice[:, choice]
        return total.to(x.dtype)


def _packed(stacked: Stacked) -> PackedExperts | Stacked:
    if stacked.storage != "plain" or not can_pack():
        return stacked
    held = torch.bfloat16 if stacked.data.dtype == torch.bfloat16 else torch.float32
    bias = None if stacked.bias is None else stacked.bias.float()
    return PackedExperts(tuple(pack(weight, held) for weight in stacked.data), bias)


def _num_experts(part: PackedExperts | Stacked) -> int:
    return part.num_experts if isinstance(part, Stacked) else len(part.experts)


def _product(x: Tensor, part: PackedExperts | Stacked, expert: int) -> Tensor:
    """[n, in] -> [n, out] float32"""
    if isinstance(part, Stacked):
        return product_twin(x, part, expert)
    bias = None if part.bias is None else part.bias[expert]
    return packed_linear(x, part.experts[expert], bias, out_dtype=torch.float32)


def _activated(x: Tensor, act: ExpertAct) -> Tensor:
    is_usual = act == ExpertAct(act.kind)  # no limits, halves: the kernel of the dense MLP
    if is_usual and (act.kind == "silu" or act.kind == "gelu" or act.kind == "gelu_tanh" or act.kind == "relu"):
        return act_mul(x, act.kind)
    return activate(x, act)
