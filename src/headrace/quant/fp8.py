"""FP8 weights and activations with one static scale each.

The forms of ModelOpt, and of `quant_method: fp8` with static activations. A linear stores `weight` (e4m3),
`weight_scale` and `input_scale`; the plain value is the stored one times its scale.
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

__all__ = ["Fp8"]


class Fp8(_fp8.Fp8Recipe):
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

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """weight [experts, out, in]; scales [experts, fused weights]. Each fused weight keeps its scale.

        Tokens of all experts are quantised at once, with the largest scale of any.
        """
        scales = _fp8.by_expert_output(_fp8.check_scales(tensors["weight_scale"], "weight_scale"), widths)
        input_scale = _fp8.check_scales(tensors["input_scale"], "input_scale").max().view(1)
        return _fp8.stacked(tensors["weight"], scales, bias, Form("static", input_scale))
