"""FP8 made of plain weights at load: a scale by output, activations with a scale by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.moe.port import Stacked
from headrace.kernels.quantise import FP8, Form
from headrace.quant import _fp8
from headrace.quant.port import PreparedWeight, Stored

__all__ = ["Fp8OnLoad"]


class Fp8OnLoad(_fp8.Fp8Recipe):
    """Half the memory of bfloat16; reads any plain checkpoint."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The plain weight."""
        return (Stored("weight", dtype, becomes_fp8=True),)

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """weight [out, in] plain."""
        return self.prepare(tensors["weight"], bias)

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """weight [experts, out, in] plain."""
        weight = tensors["weight"]
        encoded = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scales = torch.empty((*weight.shape[:2], 1), dtype=torch.float32, device=weight.device)
        for source, target, scale in zip(weight, encoded, scales):
            codes, of_expert = _fp8.encode(source)
            target.copy_(codes)
            scale.copy_(of_expert)
        return _fp8.stacked(encoded, scales, bias, Form("token"))
