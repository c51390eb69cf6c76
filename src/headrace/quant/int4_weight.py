"""Four-bit weights made at load: a float16 scale and offset for 32 inputs of an output.

The same form as GGUF's Q4_1. Activations are rounded to 8 bits for the product (see `kernels/grouped_linear.py`). On a
CPU; elsewhere the weight stays dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.grouped_linear import GroupedCodes
from headrace.quant import _grouped
from headrace.quant.port import PreparedWeight

__all__ = ["Int4Weight"]


class Int4Weight(_grouped.GroupedRecipe):
    """A third of the memory of bfloat16; a group's weights become 16 even steps from its smallest to its largest."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """weight: [out, in]; bias: [out]."""
        return _grouped.prepare_by(encode, weight, bias)


def encode(weight: Tensor) -> GroupedCodes:
    """[out, in] float32, in a multiple of the group."""
    grouped = weight.unflatten(1, (-1, _grouped.GROUP))
    smallest, largest = grouped.amin(2), grouped.amax(2)
    scales, offsets = ((largest - smallest) / 15).half().float(), smallest.half().float()
    steps = (grouped - offsets.unsqueeze(2)) / scales.unsqueeze(2).where(scales.unsqueeze(2) > 0, 1.0)
    return GroupedCodes(steps.round().clamp(0, 15).to(torch.uint8).flatten(1), scales, offsets)
