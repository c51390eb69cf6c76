"""A dense product with a weight that was packed once, whose rows have the same bits in any batch.

`torch.nn.functional.linear` has no such property in float32: the vendor library picks another kernel for 1 to 3 rows,
and with several threads for the last rows of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels._native import dtype_flag, library, num_threads
from headrace.kernels._native_product import native_product

__all__ = ["packed_linear"]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in the layout of the compiled kernel, which depends on this machine."""

    data: Tensor
    out_features: int
    in_features: int


def can_pack() -> bool:
    """Whether this machine has the compiled kernel."""
    return library() is not None


def pack(weight: Tensor, dtype: torch.dtype) -> Packed:
    """Copy a weight [out, in], stored as `dtype`: float32 or bfloat16. Keeps no reference to it."""
    native = library()
    assert native is not None, "ask can_pack first"
    if dtype_flag(weight) is None or weight.stride(-1) != 1:
        weight = weight.float().contiguous()
    out_features, in_features = weight.shape
    data = torch.zeros(native.hr_linear_packed_size(out_features, in_features), dtype=dtype)
    flags = dtype_flag(weight), dtype_flag(data)
    native.hr_linear_pack(
        weight.data_ptr(), data.data_ptr(), out_features, in_features, weight.stride(0), *flags, num_threads()
    )
    return Packed(data, out_features, in_features)


def packed_linear(
    x: Tensor, weight: Packed, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x times the weight's transpose, plus the bias; products are summed in float32.

    Args:
        x: [tokens, in] of any floating type.
        bias: [out] float32.
        out_dtype: x's dtype by default.

    Returns:
        [tokens, out]. A row depends on that row of x only, to the last bit.
    """
    native = library()
    assert native is not None
    stored = dtype_flag(weight.data)

    def call(*common: int, x_flag: int | None, out_flag: int | None) -> int:
        return native.hr_linear(*common, x_flag, stored, out_flag, num_threads())

    return native_product(call, x, weight, bias, out_dtype=out_dtype)


def packed_linear_twin(
    x: Tensor, weight: Packed, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The plain torch form of `packed_linear`, in float64."""
    every_row = torch.arange(weight.out_features)
    product = x.double() @ packed_rows(weight, every_row).double().t()
    if bias is not None:
        product = product + bias
    return product.to(out_dtype or x.dtype)


def packed_rows(weight: Packed, ids: Tensor) -> Tensor:
    """Rows of the weight: ids [n] int64 -> [n, in] in the packed dtype."""
    native = library()
    assert native is not None
    out = torch.empty((ids.shape[0], weight.in_features), dtype=weight.data.dtype)
    native.hr_linear_rows(
        weight.data.data_ptr(),
        ids.contiguous().data_ptr(),
        out.data_ptr(),
        ids.shape[0],
        weight.in_features,
        dtype_flag(weight.data),
    )
    return out
