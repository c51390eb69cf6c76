"""Triton products with FP8 weights: a few rows at the memory's speed, and block scales."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import ask_for, chain_options, grid, wait_for_predecessor
from headrace.kernels._triton_rows import ACTIVATIONS, activate
from headrace.kernels.quantise import FP8, Form, Quantised

FEW_ROWS = 16
"""Up to here `launch_few_rows` is faster than the vendor's product: docs/performance.md."""
STREAM_ROWS = 64
FEW_TILES = 264
"""Two for each of a large GPU's processors: up to here each has room for more stages."""
MAX_TILES = 1 << 13
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
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    """Bytes of each row of the weight that a chained kernel asks for while its predecessors run."""


@triton.jit
def _finish(acc, out, bias, x_scale, w_scale, rows, outputs, row_mask, mask, out_stride,
            BY_ROW: tl.constexpr, BY_OUTPUT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """acc [rows, outputs] float32: scale, add the bias, store."""
    if BY_ROW:
        acc = acc * tl.load(x_scale + rows, mask=row_mask, other=0.0)[:, None]
    else:
        acc = acc * tl.load(x_scale)
    if BY_OUTPUT:
        acc = acc * tl.load(w_scale + outputs, mask=mask, other=0.0)[None, :]
    else:
        acc = acc * tl.load(w_scale)
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)[None, :]
    at = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & mask[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _stream_kernel(
    x,
    weight,
    out,
    bias,
    x_scale,
    w_scale,
    partial,
    arrived,
    num_rows,
    num_out,
    num_in,
    x_stride,
    out_stride,
    num_splits,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (OUTPUTS rows of the weight, parts of the inputs). The weight is the wide side of the tensor cores.

    The last part to finish adds up all of them, in their order.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.cdiv(num_in // INPUTS, num_splits) * INPUTS
    begin = split * part
    end = tl.minimum(begin + part, num_in)
    if CHAINED and AHEAD:
        ask_for(weight + outputs.to(tl.int64) * num_in + begin, tl.minimum(end - begin, AHEAD))
    wait_for_predecessor(CHAINED)
    rows = tl.arange(0, ROWS)
    row_mask = rows < num_rows
    inputs = tl.arange(0, INPUTS)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    w_at = weight + outputs.to(tl.int64)[:, None] * num_in + inputs[None, :]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        values = tl.load(w_at + start)
        columns = tl.load(x_at + start, mask=row_mask[:, None], other=0.0)
        acc = tl.dot(values, tl.trans(columns), acc)
    if IS_SPLIT:
        tile_size: tl.constexpr = OUTPUTS * ROWS
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        mine = partial + (tile * num_splits + split).to(tl.int64) * tile_size
        tl.store(mine + place, acc, mask=row_mask[None, :])
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < num_splits - 1:
            return
        tl.store(arrived + tile, 0)
        tl.debug_barrier()
        acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for other in range(num_splits):
            theirs = partial + (tile * num_splits + other).to(tl.int64) * tile_size
            acc += tl.load(theirs + place, mask=row_mask[None, :], other=0.0, cache_modifier=".cg")
    _finish(tl.trans(acc), out, bias, x_scale, w_scale, rows, outputs, row_mask, outputs < num_out, out_stride,
            BY_ROW, BY_OUTPUT, HAS_BIAS)  # fmt: skip


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
    AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (FEATURES gates and the FEATURES factors that belong to them, one tile of the tensor cores)."""
    index = tl.arange(0, 2 * FEATURES)
    outputs = tl.program_id(0) * FEATURES + index % FEATURES + index // FEATURES * num_features
    if CHAINED and AHEAD:
        ask_for(weight + outputs.to(tl.int64) * num_in, tl.minimum(num_in, AHEAD))
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
    out = torch.empty((num_rows, num_features), dtype=dtype if form.is_plain else FP8, device=x.device)
    tuning = tuned(*weight.shape)
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
            ROWS=max(16, 1 << (num_rows - 1).bit_length()),
            FEATURES=GATED_FEATURES,
            INPUTS=tuning.inputs,
            BY_ROW=x_scale.numel() > 1,
            BY_OUTPUT=scales.numel() > 1,
            ACTIVATION=ACTIVATIONS[kind],
            IS_FP8_OUT=not form.is_plain,
            ROUNDED=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16 if dtype == torch.float16 else tl.float32,
            STAGES=tuning.stages,
            AHEAD=tuning.ahead,
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
    _finish(acc, out, bias, x_scale, w_scale, rows, outputs, row_mask, mask, out_stride,
            BY_ROW, BY_OUTPUT, HAS_BIAS)  # fmt: skip


def launch_few_rows(
    act: Quantised, weight: Tensor, scales: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """The contract of `fp8_linear`, without block scales. Any number of rows and any shape, fast for few."""
    x, x_scale = act.data, act.scales
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous()
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    if 0 < num_rows <= STREAM_ROWS and num_out % 64 == 0 and num_in % 256 == 0:
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


def launch_stream(
    act: Quantised,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tuning: StreamTuning | None = None,
) -> Tensor:
    """The contract of `fp8_linear` for 1 to 64 rows, outputs in multiples of 64 and inputs of 256."""
    x, x_scale = act.data, act.scales
    assert x_scale is not None and x.stride(-1) == 1 and weight.is_contiguous()
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    assert 0 < num_rows <= STREAM_ROWS and num_out % 64 == 0 and num_in % 256 == 0
    inputs, num_splits, warps, stages, ahead = tuning or tuned(num_out, num_in)
    assert num_in % (inputs * num_splits) == 0, (num_in, inputs, num_splits)
    rows = max(16, 1 << (num_rows - 1).bit_length())
    num_tiles = num_out // 64
    is_split = num_splits > 1
    out = torch.empty((num_rows, num_out), dtype=out_dtype, device=x.device)
    partial = torch.empty(num_tiles * num_splits * 64 * rows if is_split else 1, dtype=torch.float32, device=x.device)
    grid(_stream_kernel, num_tiles, num_splits)(
        x,
        weight,
        out,
        out if bias is None else bias,
        x_scale,
        scales,
        partial,
        _arrived(x.device) if is_split else partial,
        num_rows,
        num_out,
        num_in,
        x.stride(0),
        out.stride(0),
        num_splits,
        ROWS=rows,
        OUTPUTS=64,
        INPUTS=inputs,
        IS_SPLIT=is_split,
        BY_ROW=x_scale.numel() > 1,
        BY_OUTPUT=scales.numel() > 1,
        HAS_BIAS=bias is not None,
        STAGES=stages,
        AHEAD=ahead,
        **chain_options(x, warps),
    )
    return out


@cache
def _arrived(device: torch.device) -> Tensor:
    """Counters that every launch leaves at zero: launches of one stream share them."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def tuned(num_out: int, num_in: int) -> StreamTuning:
    """Measured on an H200: docs/performance.md."""
    return StreamTuning(stages=6 if num_out // 64 <= FEW_TILES else 4)


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
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)[None, :]
    at = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & mask[None, :])


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
            BLOCK=128,
            HAS_BIAS=bias is not None,
            STAGES=stages,
            num_warps=warps,
        )
    return out
