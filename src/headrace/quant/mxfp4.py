"""Experts in MXFP4: codes of four bits (e2m1) with a power of two for 32 inputs of an output, never widened in memory.

The form of gpt-oss (OpenAI 2025): `blocks` [out, in / 32, 16], two codes a byte, the first one low, and `scales`
[out, in / 32], e8m0. Format: Open Compute Project, Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.moe.port import MXFP4_BLOCK, Stacked
from headrace.quant.port import Stored

__all__ = ["Mxfp4"]


class Mxfp4:
    """For experts only: linears of such checkpoints are plain. Activations are taken as they are."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Blocks of 32 inputs, and their scales."""
        return (
            Stored("blocks", torch.uint8, 1, MXFP4_BLOCK, (MXFP4_BLOCK // 2,)),
            Stored("scales", torch.uint8, 1, MXFP4_BLOCK, is_scale=True),
        )

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """blocks [experts, out, in / 32, 16]; scales [experts, out, in / 32]."""
        return Stacked("mxfp4", tensors["blocks"].flatten(2), tensors["scales"], bias)
