"""Causal attention of rows with any number of tokens over the paged cache (FlashAttention-2's order, Dao 2023).

A program takes a tile of a row's tokens with all query heads of one KV head, so that heads share the tiles of keys
and values. Tiles below the diagonal need no mask. Right for rows of one token too, only slower than the decode kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels._triton_decode import LOG2_E, constants, strides
from headrace.kernels.port import HeadsSpec, PackedRows
from headrace.kernels.quantise import FP8, Form, Quantised

FIXED_QUERY = 16
"""Tokens of a chunk that the tiles are chosen for where they may not depend on it."""


@triton.jit
def _first_seen(position, window, IS_CHUNKED: tl.constexpr):
    """The first token in the window of a query, maybe below 0, or in its chunk."""
    if IS_CHUNKED:
        return position // window * window
    else:
        return position - window + 1


@triton.jit
def _attend_tile(
    start,
    query,
    positions,
    highest,
    total,
    acc,
    k_head,
    v_head,
    table,
    k_block_stride,
    v_block_stride,
    scale,
    cap,
    window,
    sink_tokens,
    last,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SINK_TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One tile of keys and values. last: the last position that any query sees."""
    dims = tl.arange(0, DIM_BLOCK)
    at = start + tl.arange(0, TILE)
    inside = at % BLOCK_SIZE * DIM
    if MASKED:
        block = tl.load(table + at // BLOCK_SIZE, mask=at <= last, other=0).to(tl.int64)
        mask = (at <= last)[:, None] & (dims < DIM)[None, :]
        if HAS_WINDOW:
            # Blocks that every query's window has left may be gone.
            kept = at >= _first_seen(tl.min(positions), window, IS_CHUNKED)
            if HAS_SINK_TOKENS:
                kept = kept | (at < sink_tokens)
            mask = mask & kept[:, None]
        keys = tl.load(k_head + (block * k_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
    else:
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        mask = (dims < DIM)[None, :]
        if DIM == DIM_BLOCK:
            keys = tl.load(k_head + (block * k_block_stride + inside)[:, None] + dims[None, :])
        else:
            keys = tl.load(k_head + (block * k_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(keys.to(COMPUTE)), input_precision="ieee")
    if HAS_CAP:
        natural = scale / 1.4426950408889634
        scores = cap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores * natural / cap)))
    else:
        scores = scores * scale
    if MASKED:
        seen = at[None, :] <= positions[:, None]
        if HAS_WINDOW:
            inside_window = at[None, :] >= _first_seen(positions, window, IS_CHUNKED)[:, None]
            if HAS_SINK_TOKENS:
                inside_window = inside_window | (at < sink_tokens)[None, :]
            seen = seen & inside_window
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    if MASKED:
        # A row that has seen nothing yet stays at -inf, and -inf - -inf is no number.
        floor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        fade, weights = tl.exp2(highest - floor), tl.exp2(scores - floor[:, None])
    else:
        fade, weights = tl.exp2(highest - new_highest), tl.exp2(scores - new_highest[:, None])
    total = total * fade + tl.sum(weights, 1)
    if MASKED or DIM != DIM_BLOCK:
        values = tl.load(v_head + (block * v_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
    else:
        values = tl.load(v_head + (block * v_block_stride + inside)[:, None] + dims[None, :])
    acc = tl.dot(weights.to(COMPUTE), values.to(COMPUTE), acc * fade[:, None], input_precision="ieee")
    return new_highest, total, acc


@triton.jit(do_not_specialize=["window", "sink_tokens", "table_stride"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tables,
    kv_lens,
    query_starts,
    sinks,
    out_scale,
    scale,
    cap,
    v_scale,
    q_stride,
    out_stride,
    k_block_stride,
    k_head_stride,
    v_block_stride,
    v_head_stride,
    table_stride,
    window,
    sink_tokens,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SINK_TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8_OUT: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Programs: (KV heads, rows, tiles of ROWS // GROUP tokens). Late tiles, which see the most, go first."""
    kv_head, row = tl.program_id(0), tl.program_id(1)
    TOKENS: tl.constexpr = ROWS // GROUP
    query_start = tl.load(query_starts + row)
    num_tokens = tl.load(query_starts + row + 1) - query_start
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    if tile * TOKENS >= num_tokens:
        return
    kv_len = tl.load(kv_lens + row)
    index = tl.arange(0, ROWS)
    token = tile * TOKENS + index // GROUP
    row_mask = (index < TOKENS * GROUP) & (token < num_tokens)
    token = tl.minimum(token, num_tokens - 1)
    base = kv_len - num_tokens
    positions = base + token
    dims = tl.arange(0, DIM_BLOCK)
    heads = kv_head * GROUP + index % GROUP
    packed = (query_start + token).to(tl.int64)
    q_mask = row_mask[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + (packed * q_stride + heads * DIM)[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE)

    first_position = base + tile * TOKENS
    last = tl.minimum(first_position + TOKENS, kv_len) - 1
    begin = 0
    middle = (first_position + 1) // TILE * TILE
    if HAS_WINDOW:
        if not HAS_SINK_TOKENS:
            begin = tl.maximum(_first_seen(first_position, window, IS_CHUNKED), 0) // TILE * TILE
        middle = begin
    if IS_FIXED:
        middle = begin  # the two loops' sums may be contracted differently, and where one ends depends on the chunk
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    k_head, v_head = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
    for start in tl.range(begin, middle, TILE, num_stages=STAGES):
        highest, total, acc = _attend_tile(
            start, query, positions, highest, total, acc, k_head, v_head, table, k_block_stride, v_block_stride,
            scale, cap, window, sink_tokens, last,
            DIM, DIM_BLOCK, BLOCK_SIZE, TILE, False, HAS_WINDOW, IS_CHUNKED, HAS_SINK_TOKENS,
            HAS_CAP, COMPUTE,
        )  # fmt: skip
    for start in tl.range(middle, last + 1, TILE, num_stages=STAGES):
        highest, total, acc = _attend_tile(
            start, query, positions, highest, total, acc, k_head, v_head, table, k_block_stride, v_block_stride,
            scale, cap, window, sink_tokens, last,
            DIM, DIM_BLOCK, BLOCK_SIZE, TILE, True, HAS_WINDOW, IS_CHUNKED, HAS_SINK_TOKENS,
            HAS_CAP, COMPUTE,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - highest)
    acc = acc * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    if IS_FP8_OUT:
        acc = tl.minimum(tl.maximum(acc / tl.load(out_scale), -448.0), 448.0)
    target = out + (packed * out_stride + heads * DIM)[:, None] + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=q_mask)


def launch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: PackedRows,
    spec: HeadsSpec,
    *,
    out: Quantised,
    form: Form,
    num_rows: int,
    max_query: int,
    tuning: tuple[int, int, int, int] | None = None,
    is_fixed: bool = False,
) -> None:
    """Attend the first `num_rows` rows.

    Args:
        q: [tokens, heads, dim], heads contiguous.
        out: [tokens, heads * dim] to write to; FP8 for the form `static`.
        max_query: an upper bound of these rows' numbers of tokens.
        tuning: (rows, tile, warps, stages).
        is_fixed: a token's result has the same bits in any chunk and beside any other rows.
    """
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    is_fp8 = k_cache.dtype == FP8
    rows, tile, warps, stages = tuning or tuned(
        dim, q.dtype, is_fp8=is_fp8, max_query=FIXED_QUERY if is_fixed else max_query, group=group
    )
    rows = max(rows, power_of_2(group))
    num_tiles = -(-max_query // (rows // group))
    if not num_rows or not num_tiles:
        return
    grid(_prefill_kernel, num_kv_heads, num_rows, num_tiles)(
        q,
        k_cache,
        v_cache,
        out.data,
        step.block_tables,
        step.kv_lens,
        step.query_starts,
        q if spec.sinks is None else spec.sinks,
        q if form.scale is None else form.scale,
        spec.scale * (spec.k_scale if is_fp8 else 1.0) * LOG2_E,
        spec.soft_cap or 0.0,
        spec.v_scale if is_fp8 else 1.0,
        *strides(q, out.data, k_cache, v_cache),
        step.block_tables.stride(0),
        spec.window or 0,
        spec.sink_tokens,
        BLOCK_SIZE=step.block_size,
        ROWS=rows,
        TILE=tile,
        IS_FP8_OUT=form.kind == "static",
        STAGES=stages,
        IS_FIXED=is_fixed,
        **constants(q, spec, num_kv_heads, is_fp8=is_fp8),
        num_warps=warps,
    )


def tuned(dim: int, dtype: torch.dtype, *, is_fp8: bool, max_query: int, group: int) -> tuple[int, int, int, int]:
    """(rows, tile, warps, stages), measured on an H200: docs/performance.md. Those of heads of more than 256 features
    are what holds them without spilled registers (sm_90), not yet measured."""
    if dim > 256:
        if dtype == torch.float32:
            return 16, 16, 8, 1
        return (16, 32, 4, 2) if max_query * group <= 16 else (32, 32, 8, 2)
    if dtype == torch.float32:
        return (32, 32, 4, 1) if dim > 128 else (64, 32, 4, 2)
    if max_query * group <= 16:
        return 16, 64, 4, 2
    if dim > 128:
        return 64, 32, 4, 2
    if max_query * group <= 64:
        return 64, 64, 4, 3
    if is_fp8:
        return 128, 64, 4, 3
    return (128, 32, 4, 4) if max_query <= 2048 else (128, 128, 8, 3)
