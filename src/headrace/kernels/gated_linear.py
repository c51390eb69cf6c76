"""The first half of a gated MLP with FP8 weights: the product, the activation, and what the next product takes."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.act_mul import Activation
from headrace.kernels.act_mul_quantise import act_mul_quantise, act_mul_quantise_twin
from headrace.kernels.fp8_linear import fp8_linear, fp8_linear_twin, is_block_scaled
from headrace.kernels.quantise import Form, Quantised

__all__ = ["gated_linear"]


def gated_linear(
    act: Quantised, weight: Tensor, scales: Tensor, kind: Activation, *, form: Form, dtype: torch.dtype
) -> Quantised:
    """`fp8_linear` to `dtype`, then `act_mul_quantise` of that; one kernel for few rows on a GPU.

    Args:
        act: [tokens, in] FP8 as `fp8_linear` takes it.
        weight: [2 * features, in] FP8, the gates first.
    """
    if act.data.is_cuda and can_fuse(act, weight, scales, form=form):
        from headrace.kernels._triton_linear import launch_gated

        return launch_gated(act, weight, scales, kind, form=form, dtype=dtype)
    return act_mul_quantise(fp8_linear(act, weight, scales, out_dtype=dtype), kind, form=form)


def can_fuse(act: Quantised, weight: Tensor, scales: Tensor, *, form: Form) -> bool:
    """Where the product is a stream of the weight, and each feature's scale is known before."""
    from headrace.kernels._triton_linear import FEW_ROWS

    num_out, num_in = weight.shape
    is_even = num_out % 64 == 0 and num_in % 256 == 0
    return (
        len(act.data) <= FEW_ROWS
        and is_even
        and form.kind in ("plain", "static")
        and not is_block_scaled(weight, scales)
    )


def gated_linear_twin(
    act: Quantised, weight: Tensor, scales: Tensor, kind: Activation, *, form: Form, dtype: torch.dtype
) -> Quantised:
    """The plain torch form of `gated_linear`."""
    return act_mul_quantise_twin(fp8_linear_twin(act, weight, scales, out_dtype=dtype), kind, form=form)
