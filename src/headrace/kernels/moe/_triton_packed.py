"""Triton products of tokens sorted by expert with MXFP4 weights that were repacked for them.

Of 64 inputs of a row, sixteen words of 16 bits hold each a code of every quarter, and their bits lie where a bfloat16
has sign, exponent and mantissa, or a shift away: a register of two words becomes four registers of what the tensor
cores take, with few instructions and no exchange between threads. Rows of a tile of inputs follow each other, so that
programs read whole lines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid
from headrace.kernels.moe._triton_grouped import DTYPES, Options, _activate, _nonlinear
from headrace.kernels.moe._triton_route import Tiles
from headrace.kernels.moe.port import ExpertAct, Stacked

WORDS = 16
"""Of a tile, each of four codes."""
INPUTS = 4 * WORDS
"""Of a tile: two blocks of scales."""
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
"""Bits of the code of each quarter, the lowest first: mantissa, exponent, sign. Three quarters have the distances of a
bfloat16's bits 6, 7, 8 and 15, whose value is the code's times 2 ** -126, subnormal ones too."""
MAX_EXPONENT = 128
"""A scale's e8m0; what it and 2 ** 126 make together must be a bfloat16."""


class Packed(NamedTuple):
    """An MXFP4 product's weights in tiles. Rows of gate and up alternate, if it has both."""

    data: Tensor  # [experts, in / 64, out, 16] int16
    scales: Tensor  # [experts, in / 64, out, 2] bfloat16: the scales of two blocks, times 2 ** 126
    bias: Tensor | None  # [experts, out]


class PackedTuning(NamedTuple):
    outputs: int
    """Rows of the weight of a program."""
    warps: int
    stages: int
    is_weights_first: bool
    """Whether the weight is the wide side of the tensor cores' product."""


def can_pack(stacked: Stacked) -> bool:
    """Waits for the device."""
    if stacked.storage != "mxfp4" or stacked.in_features % INPUTS:
        return False
    assert stacked.scales is not None
    return int(stacked.scales.max()) <= MAX_EXPONENT


def pack(stacked: Stacked, act: ExpertAct | None) -> Packed:
    """One expert at a time: no second copy of all. act: behind this product; None is none."""
    experts, out, _ = stacked.data.shape
    assert stacked.scales is not None
    num_tiles, device = stacked.in_features // INPUTS, stacked.data.device
    data = torch.empty((experts, num_tiles, out, WORDS), dtype=torch.int16, device=device)
    scales = torch.empty((experts, num_tiles, out, 2), dtype=torch.int16, device=device)
    order = None
    if act is not None and act.is_gated and not act.is_interleaved:
        order = torch.arange(out, device=device).view(2, out // 2).T.flatten()
    for expert in range(experts):
        rows, exponents = stacked.data[expert], stacked.scales[expert]
        if order is not None:
            rows, exponents = rows[order], exponents[order]
        codes = torch.stack((rows & 15, rows >> 4), -1).view(out, num_tiles, 4, WORDS)
        data[expert] = _words(codes).transpose(0, 1)
        scales[expert] = ((exponents.short() + 126) << 7).view(out, num_tiles, 2).transpose(0, 1)
    bias = stacked.bias if stacked.bias is None or order is None else stacked.bias[:, order].contiguous()
    return Packed(data, scales.view(torch.bfloat16), bias)


def _words(codes: Tensor) -> Tensor:
    """uint8 [..., 4, words] -> int16 [..., words]"""
    words = torch.zeros(codes[..., 0, :].shape, dtype=torch.int32, device=codes.device)
    for quarter, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            words |= (codes[..., quarter, :].int() >> bit & 1) << place
    return words.to(torch.int16)


def _quarters_assembly() -> str:
    """PTX: two words ($4) to their values times 2 ** -126, two to a register ($0 to $3)."""
    lines = ["{", ".reg .b32 t;", "and.b32 $0, $4, 0x81C081C0;"]
    for out, shift in ((1, 3), (2, 6)):
        lines += [f"shl.b32 t, $4, {shift};", f"and.b32 ${out}, t, 0x81C081C0;"]
    lines += ["shl.b32 t, $4, 1;", "and.b32 $3, t, 0x80008000;"]
    for shift, mask in ((5, "0x01000100"), (4, "0x00C000C0")):
        lines += [f"shr.u32 t, $4, {shift};", f"and.b32 t, t, {mask};", "or.b32 $3, $3, t;"]
    return "\n".join([*lines, "}"])


_QUARTERS: tl.constexpr = tl.constexpr(_quarters_assembly())


@triton.jit
def _quarters(words, COMPUTE: tl.constexpr):
    """int16 -> four tensors of values times 2 ** -126, bfloat16"""
    if tl.bfloat16 == COMPUTE:
        halves: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(_QUARTERS, "=r,=r,=r,=r,r", [words], dtype=halves, is_pure=True, pack=2)
    else:
        wide = words.to(tl.int32)
        fourth = ((wide << 1) & 0x8000) | ((wide >> 5) & 0x0100) | ((wide >> 4) & 0x00C0)
        first, second, third = wide & 0x81C0, (wide << 3) & 0x81C0, (wide << 6) & 0x81C0
        return _halves(first), _halves(second), _halves(third), _halves(fourth)


@triton.jit
def _halves(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scales(pair, COMPUTE: tl.constexpr):
    """int32 -> the two scales in it"""
    if tl.bfloat16 == COMPUTE:
        return pair.to(tl.int16).to(tl.bfloat16, bitcast=True), (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _add_quarter(acc, values, scale, x, COMPUTE: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    values = (values * scale[:, None]).to(COMPUTE)
    if WEIGHTS_FIRST:
        return tl.dot(values, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(values), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_pairs"])
def _packed_kernel(
    x, weight, scale, out, bias, factors, tile_pairs, tile_experts,
    num_pairs, num_outputs, num_tiles, x_stride, out_stride, limit, alpha, up_offset,
    PAIRS_A_ROW: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, KIND: tl.constexpr, IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (OUTPUTS rows of the weight, tiles of pairs that share an expert)."""
    WORDS: tl.constexpr = 16
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    pairs = tl.load(tile_pairs + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    is_pair = pairs < num_pairs
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs
    place = tl.arange(0, WORDS)
    row = expert * num_tiles * num_outputs + outputs
    at = weight + row[:, None] * WORDS + place[None, :]
    at_scale = scale + row
    at_x = x + (pairs // PAIRS_A_ROW).to(tl.int64)[:, None] * x_stride + place[None, :]
    acc = tl.zeros((OUTPUTS, ROWS) if WEIGHTS_FIRST else (ROWS, OUTPUTS), tl.float32)
    for _ in tl.range(0, num_tiles, num_stages=STAGES):
        if IS_EVEN:
            words, scales = tl.load(at), tl.load(at_scale)
        else:
            words = tl.load(at, mask=inside[:, None], other=0)
            scales = tl.load(at_scale, mask=inside, other=0)
        mask = is_pair[:, None]
        x_0 = tl.load(at_x, mask=mask, other=0.0).to(COMPUTE)
        x_1 = tl.load(at_x + WORDS, mask=mask, other=0.0).to(COMPUTE)
        x_2 = tl.load(at_x + 2 * WORDS, mask=mask, other=0.0).to(COMPUTE)
        x_3 = tl.load(at_x + 3 * WORDS, mask=mask, other=0.0).to(COMPUTE)
        first, second, third, fourth = _quarters(words, COMPUTE)
        low, high = _scales(scales, COMPUTE)
        acc = _add_quarter(acc, first, low, x_0, COMPUTE, WEIGHTS_FIRST)
        acc = _add_quarter(acc, second, low, x_1, COMPUTE, WEIGHTS_FIRST)
        acc = _add_quarter(acc, third, high, x_2, COMPUTE, WEIGHTS_FIRST)
        acc = _add_quarter(acc, fourth, high, x_3, COMPUTE, WEIGHTS_FIRST)
        at += num_outputs * WORDS
        at_scale += num_outputs
        at_x += 4 * WORDS
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc += tl.load(bias + expert * num_outputs + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    columns = outputs
    if IS_GATED:
        gate, up = tl.split(tl.reshape(acc, (ROWS, OUTPUTS // 2, 2)))
        acc = _activate(gate, up, limit, alpha, up_offset, KIND, HAS_LIMIT)
        columns = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        inside = columns < num_outputs // 2
    else:
        acc = _nonlinear(acc, alpha, KIND)
    if HAS_FACTORS:
        acc *= tl.load(factors + pairs, mask=is_pair, other=0.0)[:, None]
    to = out + pairs.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & inside[None, :])


def launch_packed(x: Tensor, packed: Packed, tiles: Tiles, options: Options, *, tuning: PackedTuning) -> Tensor:
    """As `launch_grouped`. x: [tokens, in] or [num_pairs, in]."""
    num_pairs, act_after, factors, out_dtype = options
    assert x.stride(1) == 1 and num_pairs % max(len(x), 1) == 0
    num_tiles, num_outputs = packed.data.shape[1:3]
    usual = act_after or ExpertAct(is_gated=False)
    num_out = num_outputs // 2 if usual.is_gated else num_outputs
    out = torch.empty((num_pairs, num_out), dtype=out_dtype, device=x.device)
    if not num_pairs:
        return out
    grid(_packed_kernel, -(-num_outputs // tuning.outputs), tiles.max_tiles)(
        x,
        packed.data,
        packed.scales.view(torch.int32).squeeze(-1),  # a word each, which is what a copy that runs ahead takes
        out,
        packed.data if packed.bias is None else packed.bias,
        x if factors is None else factors,
        tiles.pairs,
        tiles.experts,
        *(num_pairs, num_outputs, num_tiles, x.stride(0), out.stride(0)),
        *(usual.limit or 0.0, usual.alpha, usual.up_offset),
        PAIRS_A_ROW=num_pairs // len(x),
        ROWS=tiles.rows,
        OUTPUTS=tuning.outputs,
        IS_EVEN=num_outputs % tuning.outputs == 0,
        WEIGHTS_FIRST=tuning.is_weights_first,
        KIND="none" if act_after is None else act_after.kind,
        IS_GATED=usual.is_gated,
        HAS_LIMIT=usual.limit is not None,
        HAS_BIAS=packed.bias is not None,
        HAS_FACTORS=factors is not None,
        # The interpreter can't multiply others.
        COMPUTE=DTYPES[x.dtype] if x.is_cuda else tl.float32,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
    )
    return out


def tuned_packed(dtype: torch.dtype, rows: int, *, is_gated: bool, is_few: bool) -> PackedTuning:
    """What was fastest on an H200 for gpt-oss-20b's experts.

    Args:
        dtype: of activations.
        rows: of a tile.
        is_few: there are few tiles.
    """
    if dtype == torch.float32:
        return PackedTuning(32, 4, 2, False)
    if rows == 16 and is_few:
        return PackedTuning(64, 4, 4, True)
    if rows > 64:
        return PackedTuning(128, 8 if is_gated else 4, 4, True)
    if rows > 32 or is_gated:
        return PackedTuning(128, 4, 4, True)
    return PackedTuning(256, 4, 3, True)
