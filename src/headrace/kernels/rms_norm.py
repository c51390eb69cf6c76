"""Root-mean-square normalisation (Zhang and Sennrich 2019), optionally fused with the residual add before it."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._native import dtype_flag, library, num_threads
from headrace.kernels.quantise import PLAIN

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, plus_one: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """x / rms(x) * weight over the last dimension, computed in float32.

    Args:
        x: [tokens, features].
        weight: [features].
        residual: [tokens, features] in x's dtype, added to x first.
        plus_one: scale by 1 + weight and round once at the end (Gemma); otherwise the normalised value is rounded to
            x's dtype before it is scaled (Llama).

    Returns:
        [tokens, features] in x's dtype; with a residual, also x + residual. A row's result depends on that row only.
    """
    if x.is_cuda:
        from headrace.kernels._triton_rows import launch_norm

        normed, summed = launch_norm(x, weight, eps, form=PLAIN, residual=residual, plus_one=plus_one)
        return normed.data if summed is None else (normed.data, summed)
    native = library() if x.is_cpu else None
    half, weight_half = dtype_flag(x), dtype_flag(weight)
    if native is None or half is None or weight_half is None or weight_half > half or x.stride(-1) != 1:
        return rms_norm_twin(x, weight, eps, residual=residual, plus_one=plus_one)
    num_rows, dim = x.shape
    normed = torch.empty((num_rows, dim), dtype=x.dtype)
    summed = None
    if residual is not None:
        assert residual.dtype == x.dtype and residual.shape == x.shape and residual.stride(-1) == 1
        summed = torch.empty((num_rows, dim), dtype=x.dtype)
    native.hr_rms_norm(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        normed.data_ptr(),
        0 if summed is None else summed.data_ptr(),
        num_rows,
        dim,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        half,
        weight_half,
        plus_one,
        num_threads(),
    )
    return normed if summed is None else (normed, summed)


def rms_norm_twin(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, plus_one: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The plain torch form of `rms_norm`."""
    summed = x if residual is None else x + residual
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        normed = (wide * (1.0 + weight.float())).to(x.dtype)
    else:
        normed = (weight * wide.to(x.dtype)).to(x.dtype)
    return normed if residual is None else (normed, summed)
