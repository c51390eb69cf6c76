"""A product whose rows have the same bits beside any other rows: one order of sums for every number of rows.

Vendors' products choose their order by the shape, so that a request's answer depends on what shares its steps.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from headrace.kernels.fp8_linear import fp8_linear_twin, is_block_scaled
from headrace.kernels.quantise import Quantised

__all__ = ["fixed_linear"]


def fixed_linear(
    act: Quantised, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    """act times the weight's transpose, plus the bias, on a GPU.

    Args:
        act: [tokens, in], as `fp8_linear` takes it, or plain.
        weight: [out, in], FP8 or of act's type.
        scales: as `fp8_linear` takes them; None for a plain weight.

    Returns:
        [tokens, out] in `out_dtype`.
    """
    from headrace.kernels import _triton_linear as triton

    if scales is None:
        one = _one(act.data.device)
        act, scales = Quantised(act.data, one), one
    elif is_block_scaled(weight, scales):
        return triton.launch_blocks(act, weight, scales, bias, out_dtype=out_dtype, tuning=triton.TILES_OF_BLOCKS)
    return triton.launch_tiles(act, weight, scales, bias, out_dtype=out_dtype, tiles=triton.TILES)


def fixed_linear_twin(
    act: Quantised, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    """The plain torch form of `fixed_linear`, in float32; a row's last bits depend on the others."""
    if scales is not None:
        return fp8_linear_twin(act, weight, scales, bias, out_dtype=out_dtype)
    out = act.data.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(out_dtype)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)
