"""Experts in MXFP4, codes side by side: `weight` [out, in / 2], two e2m1 codes a byte, the first one low, and
`weight_scale_inv` [out, in / 32], e8m0, which despite its name is what the stored weight is multiplied with.

The form of DeepSeek-V4 (2026). Format: Open Compute Project, Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.moe.port import MXFP4_BLOCK, Stacked
from headrace.quant.port import Stored

__all__ = ["Mxfp4Packed"]

CODES = 2
"""In a byte."""


class Mxfp4Packed:
    """For experts only. Activations are taken as they are."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Bytes of codes, and the scales of 32 inputs."""
        return (
            Stored("weight", torch.uint8, 1, CODES),
            Stored("weight_scale_inv", torch.uint8, 1, MXFP4_BLOCK, is_scale=True),
        )

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """weight [experts, out, in / 2]; weight_scale_inv [experts, out, in / 32]."""
        return Stacked("mxfp4", tensors["weight"], tensors["weight_scale_inv"], bias)
