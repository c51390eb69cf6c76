"""FP8 made of plain weights at load: a scale by output, activations with a scale by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.quantise import Form
from headrace.quant import _fp8
from headrace.quant._fp8 import Fp8Weight
from headrace.quant.port import ActLike, PreparedWeight, Stored

__all__ = ["Fp8OnLoad"]


class Fp8OnLoad:
    """Half the memory of bfloat16; reads any plain checkpoint."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The plain weight."""
        return (Stored("weight", dtype),)

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """weight [out, in] plain."""
        return self.prepare(tensors["weight"], bias)

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """A plain weight, with scales by output and by token: a checkpoint states no others for it."""
        encoded, scales = _fp8.encode(weight)
        return Fp8Weight(encoded, scales, bias, Form("token"), weight.dtype)

    def wanted(self, prepared: PreparedWeight) -> Form:
        """With a scale by token."""
        return _fp8.wanted(prepared)

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] -> [tokens, out]"""
        return _fp8.linear(act, prepared, out_dtype)

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """ids [n] int64 -> [n, in]"""
        return _fp8.rows(prepared, ids)
