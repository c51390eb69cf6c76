"""What stands behind a recurrent scan: an output gate and an RMS norm by group, in one of both orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise, quantise_twin
from headrace.kernels.rms_norm import rms_norm

__all__ = ["gated_norm"]

GateActivation = Literal["silu", "sigmoid"]


class Ranks(NamedTuple):
    """Ranks that each hold as large a part of every group."""

    add: Callable[[Tensor], Tensor]
    """[tokens, groups, 1] of this rank -> the sums over all ranks"""
    count: int


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 0.0,
    *,
    act: GateActivation = "silu",
    is_gated_first: bool = False,
    ranks: Ranks | None = None,
    form: Form = PLAIN,
) -> Quantised:
    """norm(x) * act(gate), or norm(x * act(gate)); one kernel on a GPU.

    Args:
        x: [tokens, groups, dim] float32, contiguous.
        gate: [tokens, groups, dim] in the model's dtype; a token's groups lie in a row.
        weight: [dim] for all groups, or [groups, dim]; None: there is no norm.
        is_gated_first: the gate comes before the norm.
        ranks: that share the groups; None where groups are whole.
        form: what the next product takes.

    Returns:
        [tokens, groups * dim], computed in float32, rounded once to gate's dtype, then put into `form`.
    """
    if not x.is_cuda:
        return gated_norm_twin(
            x, gate, weight, eps, act=act, is_gated_first=is_gated_first, ranks=ranks, form=form, quantised=quantise
        )
    from headrace.kernels._triton_rows import launch_gated_norm

    return launch_gated_norm(x, gate, weight, eps, act=act, is_gated_first=is_gated_first, ranks=ranks, form=form)


def gated_norm_twin(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 0.0,
    *,
    act: GateActivation = "silu",
    is_gated_first: bool = False,
    ranks: Ranks | None = None,
    form: Form = PLAIN,
    quantised: Callable[[Tensor, Form], Quantised] = quantise_twin,
) -> Quantised:
    """The plain torch form of `gated_norm`."""
    active = F.silu(gate.float()) if act == "silu" else gate.float().sigmoid()
    if is_gated_first:
        x = x * active
    if weight is not None:
        x = _normed(x, weight, eps, ranks)
    if not is_gated_first:
        x = x * active
    return quantised(x.flatten(1).to(gate.dtype), form)


def _normed(x: Tensor, weight: Tensor, eps: float, ranks: Ranks | None) -> Tensor:
    """[tokens, groups, dim] float32 -> the same"""
    if weight.dim() == 1:
        assert ranks is None, "groups with one weight are whole"
        normed = rms_norm(x.flatten(0, 1), weight.float(), eps)
        assert isinstance(normed, Tensor)
        return normed.view(x.shape)
    squares, count = x.square().sum(-1, keepdim=True), x.shape[-1]
    if ranks is not None:
        squares, count = ranks.add(squares), count * ranks.count
    return x * torch.rsqrt(squares / count + eps) * weight.float()
