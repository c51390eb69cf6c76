"""A GGUF file's own blocks, multiplied as they are: no weight is dequantised in memory.

Activations are rounded to 8 bits for the product (see `kernels/grouped_linear.py`).

Formats: the block layouts of ggml. Each is codes with a scale and an offset for 16 or 32 inputs, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.kernels.grouped_linear import GroupedCodes
from headrace.quant import _grouped
from headrace.quant.none import Dense
from headrace.quant.port import PreparedWeight

__all__ = ["Gguf"]


class Gguf(_grouped.GroupedRecipe):
    """Keeps each weight in the precision of its file; a weight that is not in blocks is dense."""

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """weight: [out, in]; bias: [out]."""
        return Dense().prepare(weight, bias)

    def prepare_stored(
        self, parts: Sequence[tuple[str, Tensor]], bias: Tensor | None, *, dtype: torch.dtype
    ) -> PreparedWeight:
        """A weight from the file's bytes.

        Args:
            parts: (storage type, [rows, bytes per row] uint8) of the weights that are fused into this one, one below
                the other; `can_decode` is true of each type.
            bias: [out].
            dtype: of the rows that `rows` gives.
        """
        return _grouped.prepare_codes(_alike([decode(*part) for part in parts]), bias, dtype)


def can_decode(qtype: str) -> bool:
    """Whether a storage type consists of codes that `decode` knows."""
    return qtype in _DECODERS


def decode(qtype: str, stored: Tensor) -> GroupedCodes:
    """stored: [rows, bytes per row] uint8 of the type."""
    block_bytes, decoder = _DECODERS[qtype]
    return decoder(stored.contiguous().unflatten(1, (-1, block_bytes)))


def _alike(parts: list[GroupedCodes]) -> GroupedCodes:
    """One weight of parts that may have different types: all in eight bits, smaller groups, with offsets."""
    if len({(part.bits, part.group, part.offsets is None) for part in parts}) > 1:
        group = min(part.group for part in parts)
        parts = [_widen(part, group) for part in parts]
    return _grouped.join(parts)


def _widen(part: GroupedCodes, group: int) -> GroupedCodes:
    times = part.group // group
    offsets = torch.zeros_like(part.scales) if part.offsets is None else part.offsets
    return GroupedCodes(
        part.codes.to(torch.int8), part.scales.repeat_interleave(times, 1), offsets.repeat_interleave(times, 1)
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block. [rows, blocks] float32"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 2n]: the lower halves of all bytes, then the upper."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor, count: int) -> Tensor:
    """[..., n] -> [..., 8n / count]: `count` bits at a time, lowest first, all bytes of a place side by side."""
    return torch.cat([packed >> shift & (1 << count) - 1 for shift in range(0, 8, count)], -1)


def _q4_0(blocks: Tensor) -> GroupedCodes:
    scale = _half(blocks, 0)
    return GroupedCodes(_nibbles(blocks[..., 2:]).flatten(1), scale, -8 * scale)


def _q4_1(blocks: Tensor) -> GroupedCodes:
    return GroupedCodes(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """[..., 4] bytes -> [..., 32], bit i of the 32-bit word for element i, in the place of a fifth bit."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> GroupedCodes:
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16
    return GroupedCodes(codes.flatten(1), _half(blocks, 0), None)


def _q5_1(blocks: Tensor) -> GroupedCodes:
    codes = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).to(torch.int8)
    return GroupedCodes(codes.flatten(1), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> GroupedCodes:
    return GroupedCodes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0), None)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 12] bytes -> scales and minima [..., 8] of the groups of a K block."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales.float(), minima.float()


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """-> scales and offsets [rows, groups]"""
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    return (
        (_half(blocks, 0).unsqueeze(-1) * scales).flatten(1),
        (-_half(blocks, 2).unsqueeze(-1) * minima).flatten(1),
    )


def _q4_k(blocks: Tensor) -> GroupedCodes:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return GroupedCodes(codes.flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> GroupedCodes:
    lower = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    codes = lower | _bits(blocks[..., 16:48], 1) << 4
    return GroupedCodes(codes.to(torch.int8).flatten(1), *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> GroupedCodes:
    lower = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [rows, blocks, halves, 128]
    upper = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2)
    codes = (lower | upper << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208).unsqueeze(-1)
    return GroupedCodes(codes.flatten(1), scales.flatten(1), None)


_DECODERS: dict[str, tuple[int, Callable[[Tensor], GroupedCodes]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what turns [rows, blocks, bytes] into codes."""
