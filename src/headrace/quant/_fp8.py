"""What the FP8 recipes share: a weight in e4m3 with its scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.act_mul import Activation
from headrace.kernels.act_mul_quantise import act_mul_quantise
from headrace.kernels.fp8_linear import dequantised_weight, fp8_linear
from headrace.kernels.gated_linear import gated_linear
from headrace.kernels.moe.port import Stacked
from headrace.kernels.quantise import FP8, FP8_MAX, TINY, Form, Quantised, quantise, to_fp8
from headrace.quant.port import ActLike, PreparedWeight

_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An FP8 weight, its scales as `fp8_linear` takes them, and how it wants activations."""

    weight: Tensor  # [out, in] e4m3
    scales: Tensor  # [1], [out, 1] or [ceil(out / 128), ceil(in / 128)] float32
    bias: Tensor | None  # [out] in dtype
    form: Form
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Fp8Recipe:
    """A weight that has become an `Fp8Weight`; how it gets there from a checkpoint is each recipe's own."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """A plain weight, with scales by output and by token: a checkpoint states no others for it."""
        encoded, scales = encode(weight)
        return Fp8Weight(encoded, scales, bias, Form("token"), weight.dtype)

    def wanted(self, prepared: PreparedWeight) -> Form:
        """Quantised as the weight was loaded for."""
        assert isinstance(prepared, Fp8Weight)
        return prepared.form

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] plain, or in the form that the weight wants -> [tokens, out]"""
        assert isinstance(prepared, Fp8Weight)
        quantised = Quantised(act.data, act.scales) if act.data.dtype == FP8 else quantise(act.data, prepared.form)
        out_dtype = out_dtype or prepared.dtype
        return fp8_linear(quantised, prepared.weight, prepared.scales, prepared.bias, out_dtype=out_dtype)

    def gated(self, act: ActLike, prepared: PreparedWeight, kind: Activation, *, form: Form) -> Quantised:
        """The contract of `GatedRecipe`."""
        assert isinstance(prepared, Fp8Weight)
        if prepared.bias is not None:
            return act_mul_quantise(self.linear(act, prepared), kind, form=form)
        quantised = Quantised(act.data, act.scales) if act.data.dtype == FP8 else quantise(act.data, prepared.form)
        return gated_linear(quantised, prepared.weight, prepared.scales, kind, form=form, dtype=prepared.dtype)

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """ids [n] int64 -> [n, in]; not for block scales, whose weights are no embeddings."""
        assert isinstance(prepared, Fp8Weight)
        scales = prepared.scales[ids] if prepared.scales.numel() > 1 else prepared.scales
        return dequantised_weight(prepared.weight[ids], scales).to(prepared.dtype)


def stacked(weight: Tensor, scales: Tensor, bias: Tensor | None, form: Form) -> Stacked:
    """weight: [experts, out, in] e4m3; scales: [experts, out, 1] or by block."""
    return Stacked("fp8", weight, scales, bias, form)


def by_expert_output(scales: Tensor, widths: Sequence[int]) -> Tensor:
    """[experts, fused weights] -> one for each output. [experts, out, 1]"""
    return torch.stack([by_output(of_expert, widths) for of_expert in scales])


def check_scales(scales: Tensor, what: str) -> Tensor:
    """
    Raises:
        ValueError: a scale that is not a positive number.
    """
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise ValueError(f"the checkpoint has a {what} that is not a positive number: it is damaged, fetch it again")
    return scales


def one_scale(weight: Tensor, scales: Tensor, widths: Sequence[int]) -> Tensor:
    """Requantise fused weights with a scale each to the largest of them, in place. -> [1]

    Fused slots share their scale in most checkpoints, and then nothing changes.
    """
    largest = scales.max().view(1)
    for rows_of_slot, scale in zip(weight.split(list(widths)), scales):
        if scale != largest:
            for part in rows_of_slot.split(_CHUNK_ROWS):
                part.copy_(to_fp8(part.float() * (scale / largest)))
    return largest


def by_output(scales: Tensor, widths: Sequence[int]) -> Tensor:
    """One scale for each fused weight -> one for each output. [out, 1]"""
    return torch.cat([scale.expand(width) for scale, width in zip(scales, widths)]).unsqueeze(1).contiguous()


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] of any floating type -> e4m3 and scales [out, 1]; some rows at a time."""
    encoded = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
    for source, target, scale in zip(weight.split(_CHUNK_ROWS), encoded.split(_CHUNK_ROWS), scales.split(_CHUNK_ROWS)):
        wide = source.float()
        scale.copy_((wide.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=TINY))
        target.copy_(to_fp8(wide / scale))
    return encoded, scales
