"""The plain torch form of everything that experts' kernels compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.fp8_linear import dequantised_weight
from headrace.kernels.moe.port import MXFP4_BLOCK, ExpertAct, ExpertWeights, Routed, Routing, Stacked
from headrace.kernels.quantise import dequantise, quantise_twin

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code: a sign, two bits of exponent with bias 1, one of mantissa."""
E8M0_BIAS = 127
TINY_SUM = 1e-20


def route_twin(logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
    """The contract of `MoeBackend.route`. Of equal scores the first expert wins."""
    scores = scores_of(logits, routing)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = choice.masked_fill(~allowed(choice, routing), float("-inf"))
    return weighed(scores, top(choice, routing.top_k), routing)


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """[tokens, experts] -> float32; of `..._top` the logits"""
    wide = logits.float()
    if routing.scoring == "softmax":
        return torch.softmax(wide, -1)
    if routing.scoring == "sqrt_softplus":
        return F.softplus(wide).sqrt()
    return torch.sigmoid(wide) if routing.scoring == "sigmoid" else wide


def weighed(scores: Tensor, ids: Tensor, routing: Routing) -> Routed:
    """Experts that are chosen already, with their weights. ids: [tokens, top_k] int64"""
    weights = scores.gather(1, ids)
    if routing.scoring == "softmax_top":
        weights = torch.softmax(weights, -1)
    elif routing.scoring == "sigmoid_top":
        weights = torch.sigmoid(weights)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY_SUM)
    return Routed(ids.int(), weights * routing.scaling)


def allowed(choice: Tensor, routing: Routing) -> Tensor:
    """[tokens, experts] bool: experts of the best groups."""
    grouped = choice.unflatten(1, (routing.num_groups, -1))
    if routing.group_score == "max":
        by_group = grouped.amax(-1)
    else:
        by_group = grouped.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(by_group, dtype=torch.bool).scatter_(1, top(by_group, routing.top_groups), True)
    return kept.repeat_interleave(grouped.shape[-1], 1)


def top(values: Tensor, count: int) -> Tensor:
    """Places of the largest, in falling order; of equals the first, which `torch.topk` does not promise."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def activate(x: Tensor, act: ExpertAct) -> Tensor:
    """[n, 2 * inner] -> [n, inner], or of the same width without a gate; computed in float32, in x's dtype."""
    wide = x.float()
    if not act.is_gated:
        return _nonlinear(wide, act).to(x.dtype)
    gate, up = (wide[:, ::2], wide[:, 1::2]) if act.is_interleaved else wide.chunk(2, -1)
    if act.limit is not None:
        if act.kind == "situ":
            up = act.limit * torch.tanh(up / act.limit)
        else:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return (_nonlinear(gate, act) * (up + act.up_offset)).to(x.dtype)


def _nonlinear(x: Tensor, act: ExpertAct) -> Tensor:
    if act.kind == "silu":
        return x * torch.sigmoid(act.alpha * x)
    if act.kind == "situ":
        return act.alpha * torch.tanh(x / act.alpha) * torch.sigmoid(x)
    if act.kind == "gelu":
        return F.gelu(x)
    if act.kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    relu = torch.relu(x)
    return relu if act.kind == "relu" else relu * relu


def expert_weight(stacked: Stacked, expert: int) -> Tensor:
    """One expert's weight. [out, in], in its own dtype where it is plain, else float32"""
    data = stacked.data[expert]
    if stacked.storage == "plain":
        return data
    assert stacked.scales is not None
    if stacked.storage == "fp8":
        return dequantised_weight(data, stacked.scales[expert])
    return dequantised_mxfp4(data, stacked.scales[expert])


def dequantised_mxfp4(data: Tensor, scales: Tensor) -> Tensor:
    """data: [..., in / 2] uint8; scales: [..., in / 32] uint8 -> [..., in] float32"""
    values = torch.tensor(E2M1, dtype=torch.float32, device=data.device)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    factors = torch.exp2(scales.float() - E8M0_BIAS)
    return values[codes.int()] * factors.repeat_interleave(MXFP4_BLOCK, -1)


def product_twin(x: Tensor, stacked: Stacked, expert: int) -> Tensor:
    """x: [n, in] of one expert -> [n, out] float32, activations rounded as the weight wants them"""
    rounded = dequantise(quantise_twin(x, stacked.form)) if stacked.storage == "fp8" else x.float()
    out = rounded @ expert_weight(stacked, expert).float().t()
    return out if stacked.bias is None else out + stacked.bias[expert].float()


def run_twin(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """The contract of `MoeBackend.run`: tokens sorted by expert, one expert after another."""
    top_k = routed.ids.shape[1]
    flat = routed.ids.flatten().long() - weights.first_expert
    out = torch.zeros((flat.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    factors = routed.weights.flatten().unsqueeze(1)
    order = torch.argsort(flat, stable=True)
    for expert in range(weights.gate_up.num_experts):
        pairs = order[flat[order] == expert]
        if not len(pairs):
            continue
        rows = x[pairs // top_k]
        if weights.weighs_input:
            rows = (rows.float() * factors[pairs]).to(x.dtype)
        hidden = activate(product_twin(rows, weights.gate_up, expert).to(weights.dtype), weights.act)
        result = product_twin(hidden, weights.down, expert)
        out[pairs] = result if weights.weighs_input else result * factors[pairs]
    return out.unflatten(0, (-1, top_k)).sum(1).to(x.dtype)
