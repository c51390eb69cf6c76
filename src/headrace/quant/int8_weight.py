"""Eight-bit weights made at load: a float16 scale for 32 inputs of an output, no offset.

Activations are rounded to 8 bits for the product (see `kernels/grouped_linear.py`).

On a CPU; elsewhere the weight stays dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.grouped_linear import GroupedCodes
from headrace.quant import _grouped
from headrace.quant.port import PreparedWeight

__all__ = ["Int8Weight"]


class Int8Weight(_grouped.GroupedRecipe):
    """About half the memory of bfloat16; an error of at most half a step of 1/127 of a group's largest weight."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """weight: [out, in]; bias: [out]."""
        return _grouped.prepare_by(encode, weight, bias)


def encode(weight: Tensor) -> GroupedCodes:
    """[out, in] float32, in a multiple of the group."""
    grouped = weight.unflatten(1, (-1, _grouped.GROUP))
    scales = (grouped.abs().amax(2) / 127).half().float()
    steps = grouped / scales.unsqueeze(2).where(scales.unsqueeze(2) > 0, 1.0)
    return GroupedCodes(steps.round().clamp(-127, 127).to(torch.int8).flatten(1), scales, None)
