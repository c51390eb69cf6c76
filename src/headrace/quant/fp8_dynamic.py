"""FP8 weights with a scale by output (or one for all), activations with a scale by token, computed as they come.

The forms of compressed-tensors (`weight_scale` [out, 1]) and of `quant_method: fp8` with dynamic activations, whose
scale is one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.moe.port import Stacked
from headrace.kernels.quantise import FP8, Form
from headrace.quant import _fp8
from headrace.quant._fp8 import Fp8Weight
from headrace.quant.port import PreparedWeight, Stored

__all__ = ["Fp8Dynamic"]


class Fp8Dynamic(_fp8.Fp8Recipe):
    """Scales of any fused weights are kept as they are, by output."""

    def __init__(self, *, by_output: bool = True) -> None:
        """
        Args:
            by_output: the checkpoint's weights have a scale for each output, not one for all.
        """
        self.by_output = by_output

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The weight and its scales."""
        return (Stored("weight", FP8), Stored("weight_scale", torch.float32, 1 if self.by_output else None, None))

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """weight [out, in]; scales [out, 1] or [fused weights]."""
        scales = _fp8.check_scales(tensors["weight_scale"], "weight_scale")
        scales = scales if self.by_output else _fp8.by_output(scales, widths)
        return Fp8Weight(tensors["weight"], scales, bias, Form("token"), dtype)

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """weight [experts, out, in]; scales [experts, out, 1] or [experts, fused weights]."""
        scales = _fp8.check_scales(tensors["weight_scale"], "weight_scale")
        scales = scales if self.by_output else _fp8.by_expert_output(scales, widths)
        return _fp8.stacked(tensors["weight"], scales, bias, Form("token"))
