"""Triton products with FP8 weights: a few rows at the memory's speed, and block scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, shared_bytes, wait_for_predecessor
from headrace.kernels._triton_rows import ACTIVATIONS, activate
from headrace.kernels.quantise import GROUP as BLOCK
from headrace.kernels.quantise import Form, Quantised

FEW_ROWS = 16
"""Up to here `launch_few_rows` is faster than the vendor's product: docs/performance.md."""
STREAM_ROWS = 64
MAX_BLOCK_ROWS, FEW_BLOCK_TILES = 32, 66
"""With block scales the vendor's product is faster beyond so many rows, but where the outputs have few tiles."""
SPARE_BYTES = 4096
"""Of shared memory beside a stream's tiles: scales, and what products exchange."""
FEW_TILES = 264
"""Two for each of a large GPU's processors: up to here each has room for more stages."""
WIDE_SIDE, NARROW_SIDE = 64, 16
"""Of a product on the tensor cores: outputs or pieces of them, rows or pieces of them."""
TILES_OF_FEW, TILES = (16, 16, 256, 2, 4), (64, 64, 128, 4, 3)
"""(rows, outputs, inputs, warps, stages)"""
TILES_OF_BLOCKS = (64, 128, 4, 4)
"""(rows, outputs, warps, stages)"""
GATED_FEATURES = 32
"""Gates of a tile; with their factors the tensor cores' wide side."""


class StreamTuning(NamedTuple):
    """How a weight is streamed past a few rows."""

    inputs: int = 256
    """Of a tile."""
    parts: int = 1
    """Of the inputs that a tile has side by side: fewer outputs for each program, so that there are more of them."""
    warps: int = 4
    stages: int = 4


@triton.jit
def _scaled(acc, x_scale, w_scale, rows, outputs, row_mask, mask, BY_ROW: tl.constexpr, BY_OUTPUT: tl.constexpr):
    """acc: [rows, outputs] float32"""
    if BY_ROW:
        acc = acc * tl.load(x_scale + rows, mask=row_mask, other=0.0)[:, None]
    else:
        acc = acc * tl.load(x_scale)
    if BY_OUTPUT:
        return acc * tl.load(w_scale + outputs, mask=mask, other=0.0)[None, :]
    return acc * tl.load(w_scale)


@triton.jit
def _finish(acc, out, bias, rows, outputs, row_mask, mask, out_stride, HAS_BIAS: tl.constexpr):
    """acc [rows, outputs] float32, scaled: add the bias, store."""
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)[None, :]
    at = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _stream_kernel(
    x,
    weight,
    out,
    bias,
    x_scale,
    w_scale,
    num_rows,
    num_out,
    num_in,
    part,
    x_stride,
    x_scale_stride,
    w_scale_stride,
    out_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (OUTPUTS rows of the weight). The weight is the wide side of the tensor cores.

    That side holds PARTS pieces of each row of the weight below one another, the narrow one the same pieces of each
    row of x beside one another; products of pieces that belong together are added up, the others are thrown away.
    part: inputs of a piece; an argument, since the compiler wouldn't know that a quotient is aligned.
    BY_BLOCK: INPUTS are those of a block, whose product is scaled before it is added.
    """
    wide, narrow = tl.arange(0, PARTS * OUTPUTS), tl.arange(0, PARTS * ROWS)
    inputs = tl.arange(0, INPUTS)
    w_row = (tl.program_id(0) * OUTPUTS + wide % OUTPUTS).to(tl.int64) * num_in + wide // OUTPUTS * part
    w_at = weight + w_row[:, None] + inputs[None, :]
    wait_for_predecessor(CHAINED)
    row_mask = narrow % ROWS < num_rows
    x_at = (x + (narrow % ROWS).to(tl.int64) * x_stride + narrow // ROWS * part)[:, None] + inputs[None, :]
    x_scale_at = x_scale + narrow % ROWS * x_scale_stride + narrow // ROWS * part // INPUTS
    w_scale_at = w_scale + tl.program_id(0) * OUTPUTS // INPUTS * w_scale_stride + narrow // ROWS * part // INPUTS
    acc = tl.zeros((PARTS * OUTPUTS, PARTS * ROWS), tl.float32)
    for start in tl.range(0, part, INPUTS, num_stages=STAGES):
        values = tl.load(w_at + start)
        columns = tl.load(x_at + start, mask=row_mask[:, None], other=0.0)
        if BY_BLOCK:
            by_row = tl.load(x_scale_at + start // INPUTS, mask=row_mask, other=0.0)
            by_block = tl.load(w_scale_at + start // INPUTS)
            acc += tl.dot(values, tl.trans(columns)) * (by_row * by_block)[None, :]
        else:
            acc = tl.dot(values, tl.trans(columns), acc)
    if PARTS > 1:
        acc = tl.where((wide // OUTPUTS)[:, None] == (narrow // ROWS)[None, :], acc, 0.0)
        acc = tl.sum(tl.sum(tl.reshape(acc, (PARTS, OUTPUTS, PARTS, ROWS)), 2), 0)
    acc, rows, outputs = tl.trans(acc), tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask, row_mask = outputs < num_out, rows < num_rows
    if not BY_BLOCK:
        acc = _scaled(acc, x_scale, w_scale, rows, outputs, row_mask, mask, BY_ROW, BY_OUTPUT)
    _finish(acc, out, bias, rows, outputs, row_mask, mask, out_stride, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x,
    weight,
    out,
    out_scale,
    x_scale,
    w_scale,
    num_rows,
    num_features,
    num_in,
    x_stride,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_FP8_OUT: tl.constexpr,
    ROUNDED: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (FEATURES gates and the FEATURES factors that belong to them, one tile of the tensor cores)."""
    index = tl.arange(0, 2 * FEATURES)
    outputs = tl.program_id(0) * FEATURES + index % FEATURES + index // FEATURES * num_features
    wait_for_predecessor(CHAINED)
    rows = tl.arange(0, ROWS)
    row_mask = rows < num_rows
    inputs = tl.arange(0, INPUTS)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    w_at = weight + outputs.to(tl.int64)[:, None] * num_in + inputs[None, :]
    acc = tl.zeros((2 * FEATURES, ROWS), tl.float32)
    for start in tl.range(0, num_in, INPUTS, num_stages=STAGES):
        values = tl.load(w_at + start)
        columns = tl.load(x_at + start, mask=row_mask[:, None], other=0.0)
        acc = tl.dot(values, tl.trans(columns), acc)
    if BY_ROW:
        acc = acc * tl.load(x_scale + rows, mask=row_mask, other=0.0)[None, :]
    else:
        acc = acc * tl.load(x_scale)
    if BY_OUTPUT:
        acc = acc * tl.load(w_scale + outputs)[:, None]
    else:
        acc = acc * tl.load(w_scale)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, FEATURES, ROWS)), (1, 2, 0)))
    # Each rounded as it would be on its way through memory.
    active = activate(gate.to(ROUNDED).to(tl.float32), ACTIVATION).to(ROUNDED)
    y = (active.to(tl.float32) * up.to(ROUNDED).to(tl.float32)).to(ROUNDED)
    if IS_FP8_OUT:
        y = tl.minimum(tl.maximum(y.to(tl.float32) / tl.load(out_scale), -448.0), 448.0)
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    at = out + rows.to(tl.int64)[None, :] * num_features + features[:, None]
    tl.store(at, y.to(out.dtype.element_ty), mask=row_mask[None, :])


def launch_gated(
    act: Quantised, weight: Tensor, scales: Tensor, kind: str, *, form: Form, dtype: torch.dtype
) -> Quantised:
    """The contract of `gated_linear` where `can_fuse` says so."""
    x, x_scale = act.data, act.scales
    num_rows, num_in = x.shape
    num_features = weight.shape[0] // 2
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous() and num_rows <= STREAM_ROWS
    out = form.new_data(num_rows, num_features, dtype, x.device)
    tuning = with_room(tuned(num_rows, *weight.shape)._replace(parts=1), num_rows, shared_bytes(x.device))
    if num_rows:
        grid(_gated_kernel, num_features // GATED_FEATURES)(
            x,
            weight,
            out,
            out if form.scale is None else form.scale,
            x_scale,
            scales,
            num_rows,
            num_features,
            num_in,
            x.stride(0),
            ROWS=max(NARROW_SIDE, power_of_2(num_rows)),
            FEATURES=GATED_FEATURES,
            INPUTS=tuning.inputs,
            BY_ROW=x_scale.numel() > 1,
            BY_OUTPUT=scales.numel() > 1,
            ACTIVATION=ACTIVATIONS[kind],
            IS_FP8_OUT=not form.is_plain,
            ROUNDED=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16 if dtype == torch.float16 else tl.float32,
            STAGES=tuning.stages,
            **chain_options(x, tuning.warps),
        )
    return Quantised(out, form.scale)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x,
    weight,
    out,
    bias,
    x_scale,
    w_scale,
    num_rows,
    num_out,
    num_in,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs: (OUTPUTS rows of the weight, ROWS rows of x)."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask, row_mask = outputs < num_out, rows < num_rows
    inputs = tl.arange(0, INPUTS)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    w_at = weight + outputs.to(tl.int64)[:, None] * num_in + inputs[None, :]
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in tl.range(0, num_in, INPUTS, num_stages=STAGES):
        if IS_EVEN:
            values = tl.load(x_at + start, mask=row_mask[:, None], other=0.0)
            tile = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            inside = (start + inputs < num_in)[None, :]
            values = tl.load(x_at + start, mask=row_mask[:, None] & inside, other=0.0)
            tile = tl.load(w_at + start, mask=mask[:, None] & inside, other=0.0)
        acc = tl.dot(values, tl.trans(tile), acc, input_precision="ieee")
    acc = _scaled(acc, x_scale, w_scale, rows, outputs, row_mask, mask, BY_ROW, BY_OUTPUT)
    _finish(acc, out, bias, rows, outputs, row_mask, mask, out_stride, HAS_BIAS)


def launch_few_rows(
    act: Quantised, weight: Tensor, scales: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """The contract of `fp8_linear`, without block scales. Any number of rows and any shape, fast for few."""
    x, x_scale = act.data, act.scales
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous()
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    if 0 < num_rows <= STREAM_ROWS and num_out % WIDE_SIDE == 0 and num_in % 256 == 0:
        return launch_stream(act, weight, scales, bias, out_dtype=out_dtype)
    tiles = TILES_OF_FEW if num_rows <= 16 else TILES
    return launch_tiles(act, weight, scales, bias, out_dtype=out_dtype, tiles=tiles)


def launch_tiles(
    act: Quantised,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tiles: tuple[int, int, int, int, int],
) -> Tensor:
    """The contract of `launch_few_rows`, of weights and activations of any one type.

    Args:
        tiles: (rows, outputs, inputs, warps, stages). With the same ones a row has the same bits beside any others.
    """
    x, x_scale = act.data, act.scales
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous()
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=x.device)
    rows, outputs, inputs, warps, stages = tiles
    if num_rows:
        grid(_few_rows_kernel, -(-num_out // outputs), -(-num_rows // rows))(
            x,
            weight,
            out,
            out if bias is None else bias,
            x_scale,
            scales,
            num_rows,
            num_out,
            num_in,
            x.stride(0),
            out.stride(0),
            ROWS=rows,
            OUTPUTS=outputs,
            INPUTS=inputs,
            IS_EVEN=num_out % outputs == 0 and num_in % inputs == 0,
            BY_ROW=x_scale.numel() > 1,
            BY_OUTPUT=scales.numel() > 1,
            HAS_BIAS=bias is not None,
            STAGES=stages,
            num_warps=warps,
        )
    return out


def can_stream_blocks(num_rows: int, num_out: int, num_in: int) -> bool:
    """Whether `launch_stream` takes such a product with block scales, and is the fastest."""
    most = STREAM_ROWS if num_out // WIDE_SIDE <= FEW_BLOCK_TILES else MAX_BLOCK_ROWS
    return 0 < num_rows <= most and num_out % WIDE_SIDE == 0 == num_in % BLOCK


def launch_stream(
    act: Quantised,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    by_block: bool = False,
    tuning: StreamTuning | None = None,
) -> Tensor:
    """The contract of `fp8_linear` for 1 to 64 rows, outputs in multiples of 64 and inputs of 256; with scales by block
    inputs of 128.
    """
    x, x_scale = act.data, act.scales
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous() and scales.stride(-1) == 1
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    assert 0 < num_rows <= STREAM_ROWS and num_out % WIDE_SIDE == 0 and num_in % (BLOCK if by_block else 256) == 0
    tuning = tuning or (tuned_blocks if by_block else tuned)(num_rows, num_out, num_in)
    tuning = with_room(tuning, num_rows, shared_bytes(x.device))
    outputs = WIDE_SIDE // tuning.parts
    assert num_in % (tuning.inputs * tuning.parts) == 0, (num_in, tuning)
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=x.device)
    grid(_stream_kernel, num_out // outputs)(
        x,
        weight,
        out,
        out if bias is None else bias,
        x_scale,
        scales,
        num_rows,
        num_out,
        num_in,
        num_in // tuning.parts,
        x.stride(0),
        x_scale.stride(0),
        scales.stride(0),
        out.stride(0),
        ROWS=max(NARROW_SIDE // tuning.parts, power_of_2(num_rows)),
        OUTPUTS=outputs,
        INPUTS=tuning.inputs,
        PARTS=tuning.parts,
        BY_BLOCK=by_block,
        BY_ROW=x_scale.numel() > 1,
        BY_OUTPUT=scales.numel() > 1,
        HAS_BIAS=bias is not None,
        STAGES=tuning.stages,
        **chain_options(x, tuning.warps),
    )
    return out


def with_room(tuning: StreamTuning, num_rows: int, room: int) -> StreamTuning:
    """With as many stages as fit in `room` bytes of shared memory: most GPUs have less than half of Hopper's."""
    narrow = tuning.parts * max(NARROW_SIDE // tuning.parts, power_of_2(num_rows))
    stage_bytes = (WIDE_SIDE + narrow) * tuning.inputs
    return tuning._replace(stages=max(1, min(tuning.stages, (room - SPARE_BYTES) // stage_bytes)))


def tuned(num_rows: int, num_out: int, num_in: int) -> StreamTuning:
    """Measured on an H200, whose memory wants a program on each of its 132 processors: docs/performance.md."""
    num_tiles = num_out // WIDE_SIDE
    may_part = num_rows <= STREAM_ROWS // 2  # pieces of more rows don't fit in a processor's shared memory
    if may_part and num_tiles <= 66 and num_in % 512 == 0:
        return StreamTuning(parts=2, stages=6)
    if may_part and num_tiles <= 132 and num_in % 1024 == 0:
        return StreamTuning(parts=4, stages=3)
    return StreamTuning(stages=6 if num_tiles <= FEW_TILES else 4)


def tuned_blocks(num_rows: int, num_out: int, num_in: int) -> StreamTuning:
    """The same where each block has a scale."""
    num_tiles = num_out // WIDE_SIDE
    if num_tiles > 132:
        parts, stages = 1, 6
    elif num_tiles > FEW_BLOCK_TILES:
        parts, stages = (2, 8) if num_rows <= 8 else (1, 12)
    elif num_tiles > 40 or num_rows > MAX_BLOCK_ROWS:
        parts, stages = 2, 12 if num_rows <= 16 else 8
    else:
        parts, stages = 4, 8 if num_rows <= 8 else 6
    while num_in % (BLOCK * parts):
        parts //= 2
    return StreamTuning(inputs=BLOCK, parts=parts, stages=stages)


@triton.jit(do_not_specialize=["num_rows"])
def _blocks_kernel(
    x,
    weight,
    out,
    bias,
    x_scale,
    w_scale,
    num_rows,
    num_out,
    num_in,
    x_stride,
    x_scale_stride,
    w_scale_stride,
    out_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs: (OUTPUTS rows of the weight, ROWS rows of x). Each block's product is scaled before it is added."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask, row_mask = outputs < num_out, rows < num_rows
    inputs = tl.arange(0, BLOCK)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    w_at = weight + outputs.to(tl.int64)[:, None] * num_in + inputs[None, :]
    w_scale_at = w_scale + outputs // BLOCK * w_scale_stride
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for block in tl.range(0, tl.cdiv(num_in, BLOCK), num_stages=STAGES):
        start = block * BLOCK
        inside = (start + inputs < num_in)[None, :]
        values = tl.load(x_at + start, mask=row_mask[:, None] & inside, other=0.0)
        tile = tl.load(w_at + start, mask=mask[:, None] & inside, other=0.0)
        by_row = tl.load(x_scale + rows * x_scale_stride + block, mask=row_mask, other=0.0)
        by_output = tl.load(w_scale_at + block, mask=mask, other=0.0)
        acc += tl.dot(values, tl.trans(tile)) * by_row[:, None] * by_output[None, :]
    _finish(acc, out, bias, rows, outputs, row_mask, mask, out_stride, HAS_BIAS)


def launch_blocks(
    act: Quantised,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tuning: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """The contract of `fp8_linear` with block scales. tuning: (rows, outputs, warps, stages)."""
    x, x_scale = act.data, act.scales
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous() and scales.stride(-1) == 1
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=x.device)
    rows, outputs, warps, stages = tuning or ((16, 32, 4, 4) if num_rows <= 16 else TILES_OF_BLOCKS)
    if num_rows:
        grid(_blocks_kernel, -(-num_out // outputs), -(-num_rows // rows))(
            x,
            weight,
            out,
            out if bias is None else bias,
            x_scale,
            scales,
            num_rows,
            num_out,
            num_in,
            x.stride(0),
            x_scale.stride(0),
            scales.stride(0),
            out.stride(0),
            ROWS=rows,
            OUTPUTS=outputs,
            BLOCK=BLOCK,
            HAS_BIAS=bias is not None,
            STAGES=stages,
            num_warps=warps,
        )
    return out
