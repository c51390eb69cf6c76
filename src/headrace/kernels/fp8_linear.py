"""A product of FP8 activations and an FP8 weight, scales applied afterwards.

Many rows go to the vendor's product, few to Triton kernels that read the weight at the memory's speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.quantise import Quantised, dequantise

__all__ = ["fp8_linear"]

BLOCK = 128
"""Side of the weight's blocks that share a scale, and the activations' group."""


def fp8_linear(
    act: Quantised, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    """act times the weight's transpose, plus the bias.

    Args:
        act: [tokens, in] FP8 with scales [1], [tokens, 1], or [tokens, in / 128] together with block scales.
        weight: [out, in] FP8.
        scales: float32, [1] for the weight, [out, 1] by output, or [ceil(out / 128), ceil(in / 128)] by block.
        bias: [out] in `out_dtype`.

    Returns:
        [tokens, out] in `out_dtype`.
    """
    if not act.data.is_cuda:
        return fp8_linear_twin(act, weight, scales, bias, out_dtype=out_dtype)
    from headrace.kernels import _triton_linear

    num_rows, (num_out, num_in) = act.data.shape[0], weight.shape
    assert act.scales is not None
    if is_block_scaled(weight, scales):
        return _triton_linear.launch_blocks(act, weight, scales, bias, out_dtype=out_dtype)
    if num_rows <= _triton_linear.FEW_ROWS or num_out % 16 or num_in % 16:
        return _triton_linear.launch_few_rows(act, weight, scales, bias, out_dtype=out_dtype)
    by_row = act.scales.numel() > 1 or scales.numel() > 1
    # The vendor's product takes scales of one kind on both sides.
    act_scales = act.scales.expand(num_rows, 1).contiguous() if by_row else act.scales
    weight_scales = scales.view(1, -1).expand(1, num_out).contiguous() if by_row else scales
    fused_bias = bias if bias is not None and bias.dtype == out_dtype == torch.bfloat16 else None
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        act.data,
        weight.t(),
        scale_a=act_scales,
        scale_b=weight_scales,
        bias=fused_bias,
        out_dtype=torch.bfloat16 if by_row else out_dtype,
        use_fast_accum=True,
    )
    out = out if bias is None or fused_bias is not None else out + bias
    return out.to(out_dtype)


def is_block_scaled(weight: Tensor, scales: Tensor) -> bool:
    """Whether the scales belong to blocks. A weight of one block has one scale and counts as scaled whole."""
    return scales.numel() > 1 and scales.shape != (weight.shape[0], 1)


def fp8_linear_twin(
    act: Quantised, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    """The plain torch form of `fp8_linear`, in float32."""
    out = dequantise(act) @ dequantised_weight(weight, scales).t()
    return (out if bias is None else out + bias.float()).to(out_dtype)


def dequantised_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """[out, in] float32"""
    wide = weight.float()
    if is_block_scaled(weight, scales):
        by_row = scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
        scales = by_row.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return wide * scales
