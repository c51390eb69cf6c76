"""FP8 made of plain weights at load: a scale by output, activations with a scale by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.quant import _fp8
from headrace.quant.port import PreparedWeight, Stored

__all__ = ["Fp8OnLoad"]


class Fp8OnLoad(_fp8.Fp8Recipe):
    """Half the memory of bfloat16; reads any plain checkpoint."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The plain weight."""
        return (Stored("weight", dtype),)

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """weight [out, in] plain."""
        return self.prepare(tensors["weight"], bias)
