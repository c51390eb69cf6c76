"""FP8 weights with a scale for each block of 128 x 128, activations with one for each 128 features of a token.

The form of DeepSeek-V3 (2024). A linear stores `weight` (e4m3) and `weight_scale_inv`, which despite its name is what
the stored weight is multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.fp8_linear import BLOCK
from headrace.kernels.moe.port import Stacked
from headrace.kernels.quantise import FP8, Form
from headrace.quant import _fp8
from headrace.quant._fp8 import Fp8Weight
from headrace.quant.port import PreparedWeight, Stored

__all__ = ["Fp8Block"]


class Fp8Block(_fp8.Fp8Recipe):
    """Inputs must fill groups of 128."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The weight and its blocks' scales."""
        return (Stored("weight", FP8), Stored("weight_scale_inv", torch.float32, BLOCK, BLOCK))

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """weight [out, in]; scales [blocks, blocks].

        Raises:
            ValueError: the weight's inputs, or fused weights' outputs but the last one's, don't fill blocks.
        """
        weight = tensors["weight"]
        _check_blocks(weight.shape[1], widths)
        scales = _fp8.check_scales(tensors["weight_scale_inv"], "weight_scale_inv")
        return Fp8Weight(weight, scales, bias, Form("group", group=BLOCK), dtype)

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """weight [experts, out, in]; scales [experts, blocks, blocks].

        Raises:
            ValueError: as `load`.
        """
        weight = tensors["weight"]
        _check_blocks(weight.shape[2], widths)
        scales = _fp8.check_scales(tensors["weight_scale_inv"], "weight_scale_inv")
        return _fp8.stacked(weight, scales, bias, Form("group", group=BLOCK))


def _check_blocks(in_features: int, widths: Sequence[int]) -> None:
    if in_features % BLOCK or any(width % BLOCK for width in widths[:-1]):
        raise ValueError(
            f"a weight of {in_features} inputs and {list(widths)} outputs doesn't fill blocks of {BLOCK}:"
            " choose a smaller tensor_parallel_size, or another checkpoint"
        )
