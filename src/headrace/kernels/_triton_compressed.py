"""Attention over a window of tokens and compressed entries: the kernel of `compressed_attention`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels._triton_decode import LOG2_E, compute_dtype
from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

MAX_TILE_ELEMENTS = 16384
"""Of the vectors that a program holds at a time."""
HEADS = 16
"""That share what a program reads."""


@triton.jit
def _attend(
    query, vectors, page, inside, seen, highest, total, acc, scale, block_stride, dims,
    DIM: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One tile of vectors, keys and values at once. -> the softmax so far"""
    at = page.to(tl.int64) * block_stride + inside * DIM
    mask = seen[:, None] & (dims < DIM)[None, :]
    tile = tl.load(vectors + at[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
    scores = tl.dot(query, tl.trans(tile), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    before, highest = highest, tl.maximum(highest, tl.max(scores, 1))
    fade, weights = tl.exp2(before - highest), tl.exp2(scores - highest[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(COMPUTE), tile, acc * fade[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit(do_not_specialize=["key_table_stride", "entry_table_stride", "top"])
def _compressed_kernel(
    q, keys, entries, out, chosen, sinks, rows, positions, key_tables, entry_tables, scale,
    key_block_stride, entry_block_stride, key_table_stride, entry_table_stride, top,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, EVERY: tl.constexpr, WINDOW: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    IS_CHOSEN: tl.constexpr, HAS_SINKS: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of HEADS heads, tokens). WINDOW 0: every token before."""
    token = tl.program_id(1).to(tl.int64)
    heads, dims = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, DIM_BLOCK)
    row, end = tl.load(rows + token), (tl.load(positions + token) + 1).to(tl.int32)
    at_heads = (token * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
    mine = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + at_heads, mask=mine, other=0.0).to(COMPUTE)
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=heads < NUM_HEADS, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full((HEADS,), 1.0, tl.float32)
    else:
        highest, total = tl.full((HEADS,), -1e30, tl.float32), tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, DIM_BLOCK), tl.float32)
    begin = tl.maximum(end - WINDOW, 0) if WINDOW else 0
    key_table = key_tables + row * key_table_stride
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        seen = at < end
        page = tl.load(key_table + at // BLOCK_SIZE, mask=seen, other=0)
        highest, total, acc = _attend(
            query, keys, page, at % BLOCK_SIZE, seen, highest, total, acc, scale, key_block_stride, dims, DIM, COMPUTE
        )
    if HAS_ENTRIES:
        complete = end // EVERY
        entry_table = entry_tables + row * entry_table_stride
        count = tl.minimum(complete, top) if IS_CHOSEN else complete
        for start in range(0, count, TILE):
            number = start + tl.arange(0, TILE)
            seen = number < count
            if IS_CHOSEN:
                number = tl.load(chosen + token * top + number, mask=seen, other=-1).to(tl.int32)
                seen = (number >= 0) & (number < complete)
            last = tl.where(seen, number, 0) * EVERY + EVERY - 1
            page = tl.load(entry_table + last // BLOCK_SIZE, mask=seen, other=0)
            highest, total, acc = _attend(
                query, entries, page, last % BLOCK_SIZE // EVERY, seen,
                highest, total, acc, scale, entry_block_stride, dims, DIM, COMPUTE,
            )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at_heads, acc.to(out.dtype.element_ty), mask=mine)


def launch_compressed_attention(
    q: Tensor,
    keys: Tensor,
    step: PackedRows,
    *,
    scale: float,
    sinks: Tensor | None,
    window: int | None,
    entries: Tensor | None = None,
    entry_step: PackedRows | None = None,
    every: int = 1,
    chosen: Tensor | None = None,
) -> Tensor:
    """The contract of `compressed_attention`, without waiting for the device. Of `chosen`, those of none come last."""
    tokens, num_heads, dim = q.shape
    assert q.is_contiguous() and (chosen is None or chosen.is_contiguous())
    for cache in (keys, entries):
        assert cache is None or (cache.stride()[1:] == (dim, 1) and cache.dtype == keys.dtype)
    out = torch.empty_like(q)
    at = torch.arange(tokens, dtype=step.query_starts.dtype, device=q.device)
    # Tokens behind the last row pad a captured step; what they read is a real row's.
    rows = torch.searchsorted(step.query_starts[1:], at, right=True).clamp(max=step.kv_lens.shape[0] - 1)
    dim_block = max(16, power_of_2(dim))
    further = keys if entries is None else entries
    entry_tables = step.block_tables if entry_step is None else entry_step.block_tables
    grid(_compressed_kernel, triton.cdiv(num_heads, HEADS), tokens)(
        q, keys, further, out, q if chosen is None else chosen, q if sinks is None else sinks,
        rows, step.positions, step.block_tables, entry_tables, scale * LOG2_E,
        keys.stride(0), further.stride(0), step.block_tables.stride(0), entry_tables.stride(0),
        0 if chosen is None else chosen.shape[1],
        NUM_HEADS=num_heads, HEADS=HEADS, DIM=dim, DIM_BLOCK=dim_block, BLOCK_SIZE=step.block_size, EVERY=every,
        WINDOW=window or 0, HAS_ENTRIES=entries is not None, IS_CHOSEN=chosen is not None, HAS_SINKS=sinks is not None,
        TILE=max(16, min(64, MAX_TILE_ELEMENTS // dim_block)), COMPUTE=compute_dtype(q, is_fp8=keys.dtype == FP8),
        num_warps=4 if dim_block <= 256 else 8,
    )  # fmt: skip
    return out
