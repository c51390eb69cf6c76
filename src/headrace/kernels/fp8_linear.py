"""A product of FP8 activations and an FP8 weight, scales applied afterwards.

Many rows go to the vendor's product, few to Triton kernels that read the weight at the memory's speed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from headrace.kernels._assembler import release_of
from headrace.kernels.quantise import GROUP, Quantised, dequantise, with_spare_rows

__all__ = ["fp8_linear"]

BLOCK = GROUP
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
        if _triton_linear.can_stream_blocks(num_rows, num_out, num_in):
            return _triton_linear.launch_stream(act, weight, scales, bias, out_dtype=out_dtype, by_block=True)
        if num_rows and out_dtype == torch.bfloat16 and _vendor_takes(weight):
            out = _vendor_blocks(act, weight, scales)
            return out if bias is None else out + bias
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


def _vendor_takes(weight: Tensor) -> bool:
    """Whether the vendor has a product with block scales: of whole blocks, rows of scales in multiples of 16 bytes."""
    num_out, num_in = weight.shape
    return _has_vendor_blocks(weight.device) and num_in % (4 * BLOCK) == 0 and num_out % 16 == 0


@cache
def _has_vendor_blocks(device: torch.device) -> bool:
    """Hopper alone multiplies FP8 with float32 scales by block in the vendor's library, from CUDA 12.9 on."""
    return release_of(torch.version.cuda or "0.0") >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def _vendor_blocks(act: Quantised, weight: Tensor, scales: Tensor) -> Tensor:
    """[tokens, out] bfloat16"""
    num_rows = act.data.shape[0]
    assert act.scales is not None
    data, act_scales = _filled_up(act.data), _filled_up(act.scales)
    by_group = act_scales.t().contiguous().t()  # a group's scales beside one another
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    out = scaled_mm(data, weight.t(), by_group, kinds[0], scales.t(), kinds[1], output_dtype=torch.bfloat16)
    return out[:num_rows]


def _filled_up(rows: Tensor) -> Tensor:
    """[rows, n] with rows of any values up to the next multiple (`with_spare_rows`): without a copy where the storage
    goes on, as that of `Form.new_data` does.
    """
    (num_rows, size), stride = rows.shape, rows.stride(0)
    assert rows.stride(1) == 1
    wanted = with_spare_rows(num_rows)
    last = rows.storage_offset() + (wanted - 1) * stride + size
    if last * rows.element_size() <= rows.untyped_storage().nbytes():
        return rows.as_strided((wanted, size), (stride, 1))
    filled = rows.new_empty((wanted, size))
    filled[:num_rows].copy_(rows)
    return filled


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
