"""Triton products of tokens sorted by expert with that expert's weight: plain, FP8, and MXFP4 whose sizes or scales
keep it from being repacked (see `Stacked`, and `_triton_packed.py`).

The first product has the activation behind it: a program computes the same columns of gate and up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid
from headrace.kernels.fp8_linear import BLOCK
from headrace.kernels.moe._triton_route import Tiles
from headrace.kernels.moe.port import ExpertAct, Stacked
from headrace.kernels.quantise import Quantised

FEW_TILES = 8
"""Up to here more programs of fewer columns each keep more processors busy."""
SOME_ROWS = 32
"""Of a tile: up to here a program is bound by reading its weight."""


class GroupedTuning(NamedTuple):
    outputs: int
    """Columns of the result of a program."""
    inputs: int
    """Of a step of its loop."""
    warps: int
    stages: int
    is_weights_first: bool = False
    """Whether the weight is the wide side of the tensor cores' product, as is better for few rows."""


def _e2m1_assembly() -> str:
    """PTX: four bytes ($4) to the values of their low codes ($0, $1) and high ones ($2, $3), two to a register.

    A code's bits become sign, exponent's and mantissa's first bits of a bfloat16: that is the value times 2 ** -126,
    the subnormal one too.
    """
    lines = ["{", ".reg .b32 w, s, m, f, z;", "mov.b32 f, 0x7E807E80;", "mov.b32 z, 0x80008000;"]
    for pair, bytes_of_halves in enumerate(("0x1404", "0x3424")):
        lines.append(f"prmt.b32 w, $4, 0, {bytes_of_halves};")
        for out in (2 + pair, pair):  # high codes stand where they are wanted
            lines += ["and.b32 s, w, 0x80008000;", "shr.u32 m, w, 6;", "and.b32 m, m, 0x01C001C0;", "or.b32 s, s, m;"]
            lines += [f"fma.rn.bf16x2 ${out}, s, f, z;", "shl.b32 w, w, 4;"]
    return "\n".join([*lines, "}"])


@triton.jit
def _e2m1(codes):
    """Values of four-bit codes (in the low bits of integers), exactly. float32"""
    size = codes & 7
    bits = (size << 22) + (126 << 23)
    value = tl.where(size > 1, bits.to(tl.float32, bitcast=True), size.to(tl.float32) * 0.5)
    return tl.where((codes & 8) != 0, -value, value)


_E2M1_HALVES: tl.constexpr = tl.constexpr(_e2m1_assembly())


@triton.jit
def _e2m1_halves(packed):
    """-> (values of the low codes of bytes, of the high ones), bfloat16, exactly; four bytes at a time."""
    return tl.inline_asm_elementwise(
        _E2M1_HALVES, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def _load_weight(weight, scale, outputs, out_mask, start, num_in, row_stride, scale_stride,
                 OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, IS_MXFP4: tl.constexpr, IS_EVEN: tl.constexpr,
                 COMPUTE: tl.constexpr):  # fmt: skip
    """Rows `outputs` of one expert's weight, INPUTS of their inputs from `start` on. [OUTPUTS, INPUTS]"""
    if IS_MXFP4:
        halves = start // 2 + tl.arange(0, INPUTS // 2)
        blocks = start // 32 + tl.arange(0, INPUTS // 32)
        at = weight + outputs.to(tl.int64)[:, None] * row_stride + halves[None, :]
        at_scale = scale + outputs.to(tl.int64)[:, None] * scale_stride + blocks[None, :]
        if IS_EVEN:
            packed, exponents = tl.load(at), tl.load(at_scale)
        else:
            packed = tl.load(at, mask=out_mask[:, None] & (halves < num_in // 2)[None, :], other=0)
            exponents = tl.load(at_scale, mask=out_mask[:, None] & (blocks < num_in // 32)[None, :], other=127)
        if tl.bfloat16 == COMPUTE:
            low, high = _e2m1_halves(packed)
            factors = (exponents.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        else:
            codes = packed.to(tl.int32)
            low, high = _e2m1(codes & 15), _e2m1(codes >> 4)
            factors = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        values = tl.reshape(tl.interleave(low, high), (OUTPUTS, INPUTS // 32, 32)) * factors[:, :, None]
        return tl.reshape(values, (OUTPUTS, INPUTS)).to(COMPUTE)
    else:
        inputs = start + tl.arange(0, INPUTS)
        at = weight + outputs.to(tl.int64)[:, None] * row_stride + inputs[None, :]
        if IS_EVEN:
            return tl.load(at).to(COMPUTE)
        else:
            return tl.load(at, mask=out_mask[:, None] & (inputs < num_in)[None, :], other=0.0).to(COMPUTE)


@triton.jit
def _add_product(acc, values, tile, by_row, at_scale, outputs, out_mask, scale_row_stride, INPUTS: tl.constexpr,
                 SCALES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):  # fmt: skip
    """`acc` and values @ tile.T; with WEIGHTS_FIRST the transpose of it, whose wide side is the weight's."""
    if SCALES == "one_block":
        scales = by_row * tl.load(at_scale + tl.min(outputs, 0) // INPUTS * scale_row_stride)
        if WEIGHTS_FIRST:
            return acc + tl.dot(tile, tl.trans(values)) * scales[None, :]
        else:
            return acc + tl.dot(values, tl.trans(tile)) * scales[:, None]
    elif SCALES == "block":
        by_output = tl.load(at_scale + outputs // INPUTS * scale_row_stride, mask=out_mask, other=0.0)
        if WEIGHTS_FIRST:
            return acc + tl.dot(tile, tl.trans(values)) * by_output[:, None] * by_row[None, :]
        else:
            return acc + tl.dot(values, tl.trans(tile)) * by_row[:, None] * by_output[None, :]
    else:
        if WEIGHTS_FIRST:
            return tl.dot(tile, tl.trans(values), acc, input_precision="ieee")
        else:
            return tl.dot(values, tl.trans(tile), acc, input_precision="ieee")


@triton.jit
def _activate(gate, up, limit, alpha, up_offset, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """float32"""
    if HAS_LIMIT:
        if KIND == "situ":
            up = limit * _tanh(up / limit)
        else:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
    return _nonlinear(gate, alpha, KIND) * (up + up_offset)


@triton.jit
def _tanh(x):
    """A series near zero, where the other form would lose digits."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    return tl.where(square < 0.01, near, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


@triton.jit
def _nonlinear(x, alpha, KIND: tl.constexpr):
    if KIND == "silu":
        return x / (1.0 + tl.exp(-alpha * x))
    elif KIND == "situ":
        return alpha * _tanh(x / alpha) / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    elif KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        return x


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x,
    weight,
    out,
    bias,
    x_scale,
    w_scale,
    factors,
    tile_pairs,
    tile_experts,
    num_pairs,
    num_out,
    num_in,
    x_stride,
    x_scale_stride,
    w_expert_stride,
    w_row_stride,
    scale_expert_stride,
    scale_row_stride,
    out_stride,
    limit,
    alpha,
    up_offset,
    PAIRS_A_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs: (OUTPUTS columns of the result, tiles). A tile's pairs share an expert.

    SCALES: of weights, "none", "output", "block" (of 128 x 128), or "one_block" where a program's columns are in one.
    X_SCALES: "none", "one", "row" or "block".
    """
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    pairs = tl.load(tile_pairs + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    row_mask = pairs < num_pairs
    rows = pairs // PAIRS_A_ROW
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = columns < num_out
    first, second = columns, columns + num_out
    if IS_INTERLEAVED:
        first, second = 2 * columns, 2 * columns + 1
    inputs = tl.arange(0, INPUTS)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    weight += expert * w_expert_stride
    w_scale += expert * scale_expert_stride
    acc = tl.zeros((OUTPUTS, ROWS) if WEIGHTS_FIRST else (ROWS, OUTPUTS), tl.float32)
    acc_up = acc
    for start in tl.range(0, num_in, INPUTS, num_stages=STAGES):
        values = tl.load(x_at + start, mask=row_mask[:, None] & (start + inputs < num_in)[None, :], other=0.0)
        values = values.to(COMPUTE)
        by_row = tl.zeros((ROWS,), tl.float32)
        if X_SCALES == "block":
            by_row = tl.load(x_scale + rows * x_scale_stride + start // INPUTS, mask=row_mask, other=0.0)
        tile = _load_weight(weight, w_scale, first, mask, start, num_in, w_row_stride, scale_row_stride,
                            OUTPUTS, INPUTS, IS_MXFP4, IS_EVEN, COMPUTE)  # fmt: skip
        acc = _add_product(acc, values, tile, by_row, w_scale + start // INPUTS, first, mask, scale_row_stride,
                           INPUTS, SCALES, WEIGHTS_FIRST)  # fmt: skip
        if IS_GATED:
            tile = _load_weight(weight, w_scale, second, mask, start, num_in, w_row_stride, scale_row_stride,
                                OUTPUTS, INPUTS, IS_MXFP4, IS_EVEN, COMPUTE)  # fmt: skip
            acc_up = _add_product(acc_up, values, tile, by_row, w_scale + start // INPUTS, second, mask,
                                  scale_row_stride, INPUTS, SCALES, WEIGHTS_FIRST)  # fmt: skip
    if WEIGHTS_FIRST:
        acc, acc_up = tl.trans(acc), tl.trans(acc_up)
    if X_SCALES == "one":
        acc, acc_up = acc * tl.load(x_scale), acc_up * tl.load(x_scale)
    elif X_SCALES == "row":
        by_row = tl.load(x_scale + rows, mask=row_mask, other=0.0)[:, None]
        acc, acc_up = acc * by_row, acc_up * by_row
    if SCALES == "output":
        acc *= tl.load(w_scale + first, mask=mask, other=0.0)[None, :]
        if IS_GATED:
            acc_up *= tl.load(w_scale + second, mask=mask, other=0.0)[None, :]
    if HAS_BIAS:
        of_expert = bias + expert * (num_out * 2 if IS_GATED else num_out)
        acc += tl.load(of_expert + first, mask=mask, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            acc_up += tl.load(of_expert + second, mask=mask, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        acc = _activate(acc, acc_up, limit, alpha, up_offset, KIND, HAS_LIMIT)
    else:
        acc = _nonlinear(acc, alpha, KIND)
    if HAS_FACTORS:
        acc *= tl.load(factors + pairs, mask=row_mask, other=0.0)[:, None]
    at = out + pairs.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & mask[None, :])


class Options(NamedTuple):
    """Of a product, whatever its weights."""

    num_pairs: int
    act_after: ExpertAct | None
    """The activation behind a product of gate and up; None is none."""
    factors: Tensor | None
    """[num_pairs] float32, what results are multiplied with."""
    out_dtype: torch.dtype


def launch_grouped(
    act: Quantised, stacked: Stacked, tiles: Tiles, options: Options, *, tuning: GroupedTuning
) -> Tensor:
    """Multiply each pair's row with its expert's weight.

    Args:
        act: [tokens, in] or [num_pairs, in], in the form that `stacked` wants.

    Returns:
        [num_pairs, out], or half as wide behind a gate; rows of pairs in no tile are undefined.
    """
    x, data = act.data, stacked.data
    num_pairs, act_after, factors, out_dtype = options
    assert x.stride(1) == 1 and data.is_contiguous() and num_pairs % max(len(x), 1) == 0
    is_gated = act_after is not None and act_after.is_gated
    num_out, num_in = stacked.out_features // (2 if is_gated else 1), stacked.in_features
    constants = _constants(act, stacked, act_after, tuning, num_out=num_out)
    out = torch.empty((num_pairs, num_out), dtype=out_dtype, device=x.device)
    if not num_pairs:
        return out
    usual = act_after or ExpertAct()
    w_scale = data if stacked.scales is None else stacked.scales
    grid(_grouped_kernel, -(-num_out // tuning.outputs), tiles.max_tiles)(
        x,
        data,
        out,
        data if stacked.bias is None else stacked.bias,
        x if act.scales is None else act.scales,
        w_scale,
        x if factors is None else factors,
        tiles.pairs,
        tiles.experts,
        num_pairs,
        num_out,
        num_in,
        *(x.stride(0), 0 if act.scales is None else act.scales.stride(0)),
        *(*data.stride()[:2], *w_scale.stride()[:2], out.stride(0)),
        *(usual.limit or 0.0, usual.alpha, usual.up_offset),
        PAIRS_A_ROW=num_pairs // len(x),
        ROWS=tiles.rows,
        HAS_FACTORS=factors is not None,
        num_warps=tuning.warps,
        **constants,
    )
    return out


def _constants(
    act: Quantised, stacked: Stacked, act_after: ExpertAct | None, tuning: GroupedTuning, *, num_out: int
) -> dict[str, Any]:
    """What the kernel is compiled for, of the layer and its tiles."""
    usual = act_after or ExpertAct(is_gated=False)
    scales, x_scales = scale_kinds(act, stacked)
    outputs, inputs = tuning.outputs, tuning.inputs
    if scales == "block":
        inputs = BLOCK
        is_inside = BLOCK % outputs == 0 and num_out % BLOCK == 0 and not usual.is_interleaved
        scales = "one_block" if is_inside else scales
    return {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "IS_EVEN": num_out % outputs == 0 and stacked.in_features % inputs == 0,
        "WEIGHTS_FIRST": tuning.is_weights_first,
        "STAGES": tuning.stages,
        "SCALES": scales,
        "X_SCALES": x_scales,
        "IS_MXFP4": stacked.storage == "mxfp4",
        "KIND": "none" if act_after is None else act_after.kind,
        "IS_GATED": usual.is_gated,
        "IS_INTERLEAVED": usual.is_interleaved and usual.is_gated,
        "HAS_LIMIT": usual.limit is not None,
        "HAS_BIAS": stacked.bias is not None,
        # The interpreter can't multiply others.
        "COMPUTE": DTYPES[act.data.dtype] if act.data.is_cuda else tl.float32,
    }


DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def scale_kinds(act: Quantised, stacked: Stacked) -> tuple[str, str]:
    """(SCALES, X_SCALES) of the kernel."""
    if stacked.storage != "fp8":
        return "none", "none"
    assert stacked.scales is not None and act.scales is not None
    if stacked.form.kind == "group":
        return "block", "block"
    return "output", "one" if act.scales.numel() == 1 and stacked.form.kind == "static" else "row"


def tuned(stacked: Stacked, rows: int, *, is_gated: bool, is_few: bool) -> GroupedTuning:
    """What was fastest on an H200 of the forms that `benchmarks/gpu_experts.py` tries.

    Args:
        rows: of a tile.
        is_few: there are at most FEW_TILES tiles.
    """
    if stacked.data.dtype == torch.float32:
        return GroupedTuning(32, 32, 4, 2)
    if stacked.storage == "mxfp4":
        if rows > 64 and not is_gated:
            return GroupedTuning(128, 64, 8, 3)
        if rows == 16 and is_few and stacked.in_features > 64:
            return GroupedTuning(32, 128, 4, 4)
        return GroupedTuning(64, 64, 4, 4)
    inputs = 128 if rows <= SOME_ROWS or stacked.storage == "fp8" else 64
    if rows <= SOME_ROWS:
        return GroupedTuning(64, inputs, 4, 4, is_weights_first=True)
    if rows <= 64:
        return GroupedTuning(64 if is_gated else 128, inputs, 4, 3)
    if stacked.storage == "fp8":
        return GroupedTuning(128, inputs, 8, 3 if is_gated else 4)
    return GroupedTuning(128 if is_gated else 256, inputs, 8, 4)


@triton.jit
def _combine_kernel(results, ids, out, hidden, first_expert, num_experts, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Programs: (tokens, parts of the hidden state). Sums a token's results in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids + pair) - first_expert
        end = tl.where((expert >= 0) & (expert < num_experts), hidden, 0)  # nothing of another rank's expert
        total += tl.load(results + pair * hidden + at, mask=at < end, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


def launch_combine(results: Tensor, ids: Tensor, *, first_expert: int, num_experts: int) -> Tensor:
    """[tokens * top_k, hidden] -> [tokens, hidden], the sum over a token's experts on this rank."""
    num_tokens, top_k = ids.shape
    hidden = results.shape[1]
    assert results.is_contiguous() and ids.is_contiguous()
    out = torch.empty((num_tokens, hidden), dtype=results.dtype, device=results.device)
    if num_tokens:
        grid(_combine_kernel, num_tokens, -(-hidden // 1024))(
            results, ids, out, hidden, first_expert, num_experts, TOP_K=top_k, TILE=1024, num_warps=4
        )
    return out
