"""FP8 weights and activations with one static scale each.

The forms of ModelOpt, and of `quant_method: fp8` with static activations. A linear stores `weight` (e4m3),
`weight_scale` and `input_scale`; the plain value is the stored one times its scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.quantise import FP8, Form
from headrace.quant import _fp8
from headrace.quant._fp8 import Fp8Weight
from headrace.quant.port import ActLike, PreparedWeight, Stored

__all__ = ["Fp8"]


class Fp8:
    """Fused weights get one scale: those with a smaller one are requantised at load."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The weight and two numbers."""
        scales = (Stored(name, torch.float32, None, None) for name in ("weight_scale", "input_scale"))
        return (Stored("weight", FP8), *scales)

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """weight [out, in]; scales [fused weights]."""
        weight = tensors["weight"]
        scale = _fp8.one_scale(weight, _fp8.check_scales(tensors["weight_scale"], "weight_scale"), widths)
        input_scale = _fp8.check_scales(tensors["input_scale"], "input_scale").max().view(1)
        return Fp8Weight(weight, scale, bias, Form("static", input_scale), dtype)

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """A plain weight, with scales by output and by token: a checkpoint states no others for it."""
        encoded, scales = _fp8.encode(weight)
        return Fp8Weight(encoded, scales, bias, Form("token"), weight.dtype)

    def wanted(self, prepared: PreparedWeight) -> Form:
        """Over the calibrated scale."""
        return _fp8.wanted(prepared)

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] -> [tokens, out]"""
        return _fp8.linear(act, prepared, out_dtype)

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """ids [n] int64 -> [n, in]"""
        return _fp8.rows(prepared, ids)
