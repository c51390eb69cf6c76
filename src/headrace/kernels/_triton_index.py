"""The indexer's scores of cached tokens: the kernel of `index_choice`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels._triton_decode import compute_dtype
from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

MAX_SCORE_BYTES = 256 << 20
"""Of the scores that are held at a time: many tokens over a long context are done in parts."""
TILE = 64
TOKENS = 16
"""Tokens of a row for which a program reads a tile of keys."""


@triton.jit(do_not_specialize=["first_token", "end_token", "width", "table_stride"])
def _score_kernel(
    q,
    weights,
    keys,
    scores,
    tables,
    kv_lens,
    query_starts,
    scale,
    q_stride,
    weights_stride,
    block_stride,
    table_stride,
    first_token,
    end_token,
    width,
    NUM_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EVERY: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Programs: (tiles of keys, rows, tiles of TOKENS tokens). -inf where a token doesn't see.

    A key stands for EVERY tokens; it is kept in the last one's block.
    """
    start, row = tl.program_id(0) * TILE, tl.program_id(1)
    query_start = tl.load(query_starts + row)
    query_end = tl.load(query_starts + row + 1)
    kv_len = tl.load(kv_lens + row)
    base = kv_len - query_end
    begin = query_start + tl.program_id(2) * TOKENS
    end = tl.minimum(tl.minimum(begin + TOKENS, query_end), end_token)
    begin = tl.maximum(begin, first_token)
    if begin >= end:
        return
    at = start + tl.arange(0, TILE)
    last = at * EVERY + EVERY - 1
    heads, dims = tl.arange(0, HEADS_BLOCK), tl.arange(0, DIM_BLOCK)
    known = last < base + end
    block = tl.load(tables + row.to(tl.int64) * table_stride + last // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    at_key = block * block_stride + last % BLOCK_SIZE // EVERY * DIM
    mask = known[:, None] & (dims < DIM)[None, :]
    tile = tl.trans(tl.load(keys + at_key[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE))
    for step in range(end - begin):
        token = begin + step
        place = token.to(tl.int64)
        q_mask = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
        query = tl.load(q + place * q_stride + heads[:, None] * DIM + dims[None, :], mask=q_mask, other=0.0)
        hits = tl.maximum(tl.dot(query.to(COMPUTE), tile, input_precision="ieee") * scale, 0.0)
        share = tl.load(weights + place * weights_stride + heads, mask=heads < NUM_HEADS, other=0.0)
        total = tl.sum(hits * share[:, None], 0)
        total = tl.where(last <= base + token, total, float("-inf"))
        tl.store(scores + (place - first_token) * width + at, total, mask=at < width)


def _all(step: PackedRows, top: int, *, every: int) -> Tensor:
    """Everybody sees everything. [tokens, top] int64"""
    at = torch.arange(top, device=step.positions.device)
    return at.where(at < (step.positions[:, None] + 1) // every, -1)


def launch_index_choice(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    step: PackedRows,
    *,
    top: int,
    scale: float,
    max_query: int,
    max_kv: int,
    every: int = 1,
) -> Tensor:
    """The contract of `index_choice`, of `entry_choice` with `every`, without waiting for the device. Where there are
    fewer than `top`, -1 comes last.

    Args:
        max_query, max_kv: upper bounds of the rows' lengths.
    """
    tokens, num_heads, dim = q.shape
    width = max_kv // every
    if width <= top:
        return _all(step, top, every=every)
    num_rows = step.kv_lens.shape[0]
    assert q.stride()[1:] == (dim, 1) and keys.stride()[1:] == (dim, 1) and weights.stride(1) == 1
    out = torch.empty((tokens, top), dtype=torch.int64, device=q.device)
    count = max(1, min(tokens, MAX_SCORE_BYTES // (4 * width)))
    scores = torch.empty((count, width), dtype=torch.float32, device=q.device)
    for first in range(0, tokens, count):
        end = min(first + count, tokens)
        per_program = min(TOKENS, power_of_2(max_query))
        grid(_score_kernel, -(-width // TILE), num_rows, -(-max_query // per_program))(
            q,
            weights,
            keys,
            scores,
            step.block_tables,
            step.kv_lens,
            step.query_starts,
            scale,
            q.stride(0),
            weights.stride(0),
            keys.stride(0),
            step.block_tables.stride(0),
            first,
            end,
            width,
            NUM_HEADS=num_heads,
            HEADS_BLOCK=max(16, power_of_2(num_heads)),
            DIM=dim,
            DIM_BLOCK=max(16, power_of_2(dim)),
            BLOCK_SIZE=step.block_size,
            EVERY=every,
            TILE=TILE,
            TOKENS=per_program,
            COMPUTE=compute_dtype(q, is_fp8=keys.dtype == FP8),
            num_warps=4,
        )
        best = scores[: end - first].topk(top, -1)
        out[first:end] = best.indices.where(best.values > float("-inf"), -1)
    return out
