"""A call of a compiled product with a weight that was packed for it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels._native import dtype_flag


class PackedWeight(Protocol):
    @property
    def data(self) -> Tensor: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class NativeProduct(Protocol):
    def __call__(self, *common: int, x_flag: int | None, out_flag: int | None) -> int:
        """Call the kernel; 0, or something else where there was no memory.

        Args:
            common: addresses of x, weight, bias (or 0) and result; tokens, inputs, outputs; x's stride in elements.
            x_flag, out_flag: as of `dtype_flag`.
        """
        ...


def native_product(
    call: NativeProduct, x: Tensor, weight: PackedWeight, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> Tensor:
    """x: [tokens, in] of any floating type; bias: [out] float32 -> [tokens, out] in `out_dtype`, or x's dtype."""
    assert x.shape[1] == weight.in_features, f"{x.shape[1]} features for a weight of {weight.in_features}"
    out_dtype = out_dtype or x.dtype
    if dtype_flag(x) is None or x.stride(-1) != 1:
        x = x.float().contiguous()
    out = torch.empty(
        (x.shape[0], weight.out_features), dtype=torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    )
    failed = call(
        x.data_ptr(),
        weight.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.in_features,
        weight.out_features,
        x.stride(0),
        x_flag=dtype_flag(x),
        out_flag=dtype_flag(out),
    )
    if failed:
        raise MemoryError("no memory for a product's scratch: lower max_num_tokens")
    return out if out.dtype == out_dtype else out.to(out_dtype)
