"""What the recipes of grouped codes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.grouped_linear import (
    Grouped,
    GroupedCodes,
    can_pack_codes,
    grouped_linear,
    grouped_rows,
    pack_codes,
)
from headrace.quant._plain import FromPlain
from headrace.quant.none import Dense
from headrace.quant.port import ActLike, PreparedWeight

GROUP = 32
"""Inputs that share a scale when a recipe makes the codes itself."""

_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A packed weight and the dtype in which its rows are wanted."""

    weight: Grouped
    bias: Tensor | None  # [out] float32
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def size_bytes(self) -> int:
        return self.weight.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


class GroupedRecipe(FromPlain):
    """Weights of grouped codes, and dense ones where the kernel can't take them."""

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] -> [tokens, out]"""
        if not isinstance(prepared, GroupedWeight):
            return Dense().linear(act, prepared, out_dtype=out_dtype)
        return grouped_linear(act.data, prepared.weight, prepared.bias, out_dtype=out_dtype)

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """ids [n] int64 -> [n, in]"""
        if not isinstance(prepared, GroupedWeight):
            return Dense().rows(prepared, ids)
        return grouped_rows(prepared.weight, ids).to(prepared.dtype)


def prepare_codes(codes: GroupedCodes, bias: Tensor | None, dtype: torch.dtype) -> PreparedWeight:
    """A weight of these codes; where the kernel can't take them, the dense weight they stand for.

    Args:
        bias: [out].
        dtype: of the rows that `rows` gives.
    """
    if not can_pack_codes(codes):
        return Dense().prepare(codes.weight().to(dtype), bias)
    return GroupedWeight(pack_codes(codes), None if bias is None else bias.float(), dtype)


def prepare_by(encode: Callable[[Tensor], GroupedCodes], weight: Tensor, bias: Tensor | None) -> PreparedWeight:
    """Encode a dense weight [out, in], some rows at a time. One whose inputs don't fill groups stays dense."""
    in_features = weight.shape[1]
    if weight.device.type != "cpu" or in_features % GROUP:
        return Dense().prepare(weight, bias)
    parts = [encode(rows.float()) for rows in weight.split(max(1, _CHUNK_ELEMENTS // in_features))]
    return prepare_codes(join(parts), bias, weight.dtype)


def join(parts: list[GroupedCodes]) -> GroupedCodes:
    """Codes of the same kind, one below the other."""
    offsets = [part.offsets for part in parts if part.offsets is not None]
    assert len(offsets) in (0, len(parts))
    return GroupedCodes(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )
