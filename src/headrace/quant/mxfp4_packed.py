"""Experts in MXFP4, codes side by side: `weight` [out, in / 2], two e2m1 codes a byte, the first one low, and
`weight_scale_inv` [out, in / 32], e8m0, which despite its name is what the stored weight is multiplied with.

The form of DeepSeek-V4 (2026); compressed-tensors (`mxfp4-pack-quantized`, as of Kimi-K3) calls the same
`weight_packed` and `weight_scale`. Format: Open Compute Project, Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.moe.port import MXFP4_BLOCK, Stacked
from headrace.quant.port import Stored

__all__ = ["Mxfp4Packed"]

CODES = 2
"""In a byte."""


@dataclass(frozen=True, slots=True)
class Mxfp4Packed:
    """For experts only. Activations are taken as they are."""

    codes: str = "weight"
    scales: str = "weight_scale_inv"
    """Names of what is stored."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """Bytes of codes, and the scales of 32 inputs."""
        return (
            Stored(self.codes, torch.uint8, 1, CODES),
            Stored(self.scales, torch.uint8, 1, MXFP4_BLOCK, is_scale=True),
        )

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """Codes [experts, out, in / 2]; scales [experts, out, in / 32]."""
        return Stacked("mxfp4", tensors[self.codes], tensors[self.scales], bias)
