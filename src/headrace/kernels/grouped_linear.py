"""A product with a weight of small codes, in integers: weight = scale * code + offset, for groups of inputs.

Activations are rounded to 8 bits with a scale for each token and group of inputs, as llama.cpp does it: a relative
error of 0.6% in a product, about twice that of rounding them to bfloat16. Products within a group are exact and groups
are added in order, so the same row has the same bits in any batch. A 4-bit weight takes a third of the memory traffic
of bfloat16, which is what one row's product waits for, and, without matrix tiles, less arithmetic too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels._native import library, num_threads
from headrace.kernels._native_product import native_product

__all__ = ["grouped_linear"]


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A weight as codes, a byte each, before it is packed."""

    codes: Tensor
    """[out, in]: uint8 0 to 15 (4 bits) or int8 (8 bits)."""
    scales: Tensor
    """[out, in / group] float32"""
    offsets: Tensor | None
    """[out, in / group] float32; None is zero."""

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def group(self) -> int:
        """Inputs that share a scale: 16 or 32."""
        return self.codes.shape[1] // self.scales.shape[1]

    def weight(self) -> Tensor:
        """[out, in] float32"""
        grouped = self.codes.unflatten(1, (-1, self.group)).float() * self.scales.unsqueeze(2)
        return (grouped if self.offsets is None else grouped + self.offsets.unsqueeze(2)).flatten(1)


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight of codes in the layout of the compiled kernel, which depends on this machine."""

    data: Tensor
    out_features: int
    in_features: int
    bits: int
    group: int
    scale_is_half: bool
    has_offset: bool


def can_pack_codes(codes: GroupedCodes) -> bool:
    """Whether this machine has the compiled kernel, and it takes these groups."""
    whole_groups = codes.codes.shape[1] % codes.scales.shape[1] == 0
    return library() is not None and whole_groups and codes.group in (16, 32)


def pack_codes(codes: GroupedCodes) -> Grouped:
    """Copy codes to the kernel's layout. Scales and offsets are kept in float16 if that changes none of them."""
    native = library()
    assert native is not None, "ask can_pack_codes first"
    out_features, in_features = codes.codes.shape
    scales, offsets, values = codes.scales.contiguous(), codes.offsets, codes.codes.contiguous()
    offsets = None if offsets is None else offsets.contiguous()
    half = _fits_half(scales) and (offsets is None or _fits_half(offsets))
    sizes = (out_features, in_features, codes.bits, codes.group, half)
    data = torch.zeros(native.hr_grouped_packed_size(*sizes, offsets is not None), dtype=torch.uint8)
    native.hr_grouped_pack(
        values.data_ptr(),
        scales.data_ptr(),
        0 if offsets is None else offsets.data_ptr(),
        data.data_ptr(),
        *sizes,
        num_threads(),
    )
    return Grouped(data, *sizes, offsets is not None)


def grouped_linear(
    x: Tensor, weight: Grouped, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x, rounded, times the weight's transpose, plus the bias.

    Args:
        x: [tokens, in] of any floating type.
        bias: [out] float32.
        out_dtype: x's dtype by default.

    Returns:
        [tokens, out]. A row depends on that row of x only, to the last bit.
    """
    native = library()
    assert native is not None
    form = (weight.bits, weight.group, weight.scale_is_half, weight.has_offset)

    def call(*common: int, x_flag: int | None, out_flag: int | None) -> int:
        return native.hr_grouped_linear(*common, x_flag, out_flag, *form, num_threads())

    return native_product(call, x, weight, bias, out_dtype=out_dtype)


def grouped_linear_twin(
    x: Tensor, weight: Grouped, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The plain torch form of `grouped_linear`, in float64."""
    product = (
        round_activations(x, weight.group).double()
        @ grouped_rows(weight, torch.arange(weight.out_features)).double().t()
    )
    if bias is not None:
        product = product + bias
    return product.to(out_dtype or x.dtype)


def grouped_rows(weight: Grouped, ids: Tensor) -> Tensor:
    """Rows of the weight: ids [n] int64 -> [n, in] float32."""
    native = library()
    assert native is not None
    out = torch.empty((ids.shape[0], weight.in_features), dtype=torch.float32)
    native.hr_grouped_rows(
        weight.data.data_ptr(),
        ids.contiguous().data_ptr(),
        out.data_ptr(),
        ids.shape[0],
        weight.in_features,
        weight.bits,
        weight.group,
        weight.scale_is_half,
        weight.has_offset,
    )
    return out


def round_activations(x: Tensor, group: int) -> Tensor:
    """What the kernel takes x for. [tokens, in] float32"""
    grouped = x.float().unflatten(1, (-1, group))
    largest = grouped.abs().amax(2, keepdim=True)
    codes = (grouped * (127 / largest).where(largest > 0, 0.0)).round()
    return (codes * (largest / 127)).flatten(1)


def _fits_half(values: Tensor) -> bool:
    return torch.equal(values.half().float(), values)
