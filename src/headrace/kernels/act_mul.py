"""The gated activation of an MLP: activation(gate) * up."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._native import dtype_flag, library, num_threads
from headrace.kernels.quantise import PLAIN

__all__ = ["act_mul"]

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]

_NATIVE_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


def act_mul(x: Tensor, kind: Activation) -> Tensor:
    """Activate the first half of the features and multiply it with the second half.

    Args:
        x: [tokens, 2 * features], the gate first.
        kind: "silu", "gelu_tanh", "gelu" (with erf) or "relu".

    Returns:
        [tokens, features] in x's dtype; the activation is rounded to it before the product.
    """
    if x.is_cuda and kind in _NATIVE_KINDS:
        from headrace.kernels._triton_rows import launch_act_mul

        return launch_act_mul(x, kind, form=PLAIN).data
    native = library() if x.is_cpu else None
    half = dtype_flag(x)
    if native is None or half is None or kind not in _NATIVE_KINDS or x.stride(-1) != 1:
        return act_mul_twin(x, kind)
    num_rows, features = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, features), dtype=x.dtype)
    native.hr_act_mul(
        x.data_ptr(), out.data_ptr(), num_rows, features, x.stride(0), _NATIVE_KINDS[kind], half, num_threads()
    )
    return out


def act_mul_twin(x: Tensor, kind: Activation) -> Tensor:
    """The plain torch form of `act_mul`."""
    gate, up = x.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "gelu":
        return F.gelu(gate) * up
    if kind == "relu":
        return F.relu(gate) * up
    raise ValueError(f"unknown activation {kind!r}: it is one of silu, gelu_tanh, gelu, relu")
