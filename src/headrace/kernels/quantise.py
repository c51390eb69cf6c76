"""Activations in eight-bit floating point (e4m3), with one scale for all, for a token, or for a group of features.

`x` is stored as `round(x / scale)`, saturated at the largest finite value. A zero row has scale `TINY`, not zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["quantise"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-12
"""The smallest scale."""
ROW_MULTIPLE = 4
GROUP = 128
"""Features that share a scale where there is one for each group of them."""

Kind = Literal["plain", "static", "token", "group"]


class Quantised(NamedTuple):
    """Activations, and their scales where they are quantised."""

    data: Tensor  # [tokens, features]
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """How activations are wanted.

    `plain`: in their own dtype. `static`: FP8 over `scale`. `token`: FP8, a scale for each token, its largest value
    over 448. `group`: the same for each `group` features of a token.
    """

    kind: Kind = "plain"
    scale: Tensor | None = None
    """[1] float32 on the activations' device, for `static`."""
    group: int = GROUP

    @property
    def is_plain(self) -> bool:
        return self.kind == "plain"

    def new_data(self, num_tokens: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor that a kernel writes activations to, [tokens, features]; plain ones are in `dtype`.

        Its storage goes on to a multiple of `ROW_MULTIPLE` tokens: some products take no other number of rows.
        """
        num_rows = num_tokens if self.is_plain else with_spare_rows(num_tokens)
        return torch.empty((num_rows, features), dtype=dtype if self.is_plain else FP8, device=device)[:num_tokens]

    def new_scales(self, num_tokens: int, features: int, device: torch.device) -> Tensor | None:
        """The tensor that a kernel writes scales to: [tokens, 1], or [tokens, groups]; the given scale for `static`."""
        if self.kind == "token":
            return torch.empty((num_tokens, 1), dtype=torch.float32, device=device)
        if self.kind == "group":
            assert features % self.group == 0, (features, self.group)
            return torch.empty((num_tokens, features // self.group), dtype=torch.float32, device=device)
        return self.scale


PLAIN = Form()


def quantise(x: Tensor, form: Form) -> Quantised:
    """x: [tokens, features] of any floating type -> FP8 and float32 scales: [1], [tokens, 1] or [tokens, groups]."""
    if form.is_plain:
        return Quantised(x)
    if x.is_cuda:
        from headrace.kernels._triton_rows import launch_quantise

        return launch_quantise(x, form)
    return quantise_twin(x, form)


def quantise_twin(x: Tensor, form: Form) -> Quantised:
    """The plain torch form of `quantise`."""
    if form.is_plain:
        return Quantised(x)
    wide = x.float()
    if form.kind == "static":
        assert form.scale is not None
        return Quantised(to_fp8(wide / form.scale), form.scale)
    if form.kind == "token":
        scales = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=TINY)
        return Quantised(to_fp8(wide / scales), scales)
    grouped = wide.unflatten(-1, (-1, form.group))
    scales = (grouped.abs().amax(-1) / FP8_MAX).clamp(min=TINY)
    return Quantised(to_fp8((grouped / scales.unsqueeze(-1)).flatten(-2)), scales)


def with_spare_rows(num_rows: int) -> int:
    """The next multiple of `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def to_fp8(x: Tensor) -> Tensor:
    """Nearest, saturated; torch's own conversion makes a NaN of what is too large."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantise(act: Quantised) -> Tensor:
    """[tokens, features] float32"""
    wide = act.data.float()
    if act.scales is None:
        return wide
    if act.scales.numel() == 1 or act.scales.shape[-1] == 1:
        return wide * act.scales
    return (wide.unflatten(-1, (act.scales.shape[-1], -1)) * act.scales.unsqueeze(-1)).flatten(-2)
