"""Chosen blocks of a paged cache: the kernels of `block_choice` and `sparse_attention`.

A query reads the index keys of its context, and keys and values of the blocks that it chose, nothing else. Lengths are
read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels._triton_decode import LOG2_E, compute_dtype, strides
from headrace.kernels.block_choice import BlockIndexSpec
from headrace.kernels.port import HeadsSpec, PackedRows
from headrace.kernels.quantise import FP8

MAX_SCORE_BYTES = 256 << 20
"""Of the scores that are held at a time: many tokens over a long context are done in parts."""
TILE = 64
TOKENS = 16
"""Tokens of a row for which a program reads a block of keys."""


@triton.jit(do_not_specialize=["first_token", "end_token", "num_blocks", "table_stride"])
def _block_score_kernel(
    q,
    keys,
    scores,
    tables,
    kv_lens,
    query_starts,
    q_stride,
    block_stride,
    table_stride,
    first_token,
    end_token,
    num_blocks,
    NUM_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Programs: (blocks, rows, tiles of TOKENS tokens). -inf for a block that a token sees nothing of."""
    number, row = tl.program_id(0), tl.program_id(1)
    query_start, query_end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    base = tl.load(kv_lens + row) - query_end
    begin = query_start + tl.program_id(2) * TOKENS
    end = tl.minimum(tl.minimum(begin + TOKENS, query_end), end_token)
    begin = tl.maximum(begin, first_token)
    heads, dims = tl.arange(0, HEADS_BLOCK), tl.arange(0, DIM_BLOCK)
    q_mask = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
    for offset in range(end - begin):
        token = begin + offset
        place = token.to(tl.int64)
        query = tl.load(q + place * q_stride + heads[:, None] * DIM + dims[None, :], mask=q_mask, other=0.0)
        best = tl.full((HEADS_BLOCK,), float("-inf"), tl.float32)
        last = tl.minimum((number + 1) * BLOCK, base + token + 1)
        for start in range(number * BLOCK, last, TILE):
            at = start + tl.arange(0, TILE)
            seen = at < last
            page = tl.load(tables + row.to(tl.int64) * table_stride + at // BLOCK_SIZE, mask=seen, other=0)
            at_key = page.to(tl.int64) * block_stride + at % BLOCK_SIZE * DIM
            mask = seen[:, None] & (dims < DIM)[None, :]
            tile = tl.load(keys + at_key[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
            hits = tl.dot(query.to(COMPUTE), tl.trans(tile), input_precision="ieee")
            best = tl.maximum(best, tl.max(tl.where(seen[None, :], hits, float("-inf")), 1))
        target = scores + ((place - first_token) * NUM_HEADS + heads) * num_blocks + number
        tl.store(target, best, mask=heads < NUM_HEADS)


@triton.jit(do_not_specialize=["table_stride", "top"])
def _sparse_kernel(
    q,
    k_cache,
    v_cache,
    out,
    chosen,
    rows,
    positions,
    tables,
    kv_lens,
    scale,
    v_scale,
    q_stride,
    out_stride,
    k_block_stride,
    k_head_stride,
    v_block_stride,
    v_head_stride,
    table_stride,
    top,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Programs: (KV heads, tokens). Heads are rows, as in the prefill kernel."""
    kv_head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + token)
    length = tl.minimum(tl.load(positions + token) + 1, tl.load(kv_lens + row)).to(tl.int32)
    index, dims = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    at_heads = (kv_head * GROUP + index)[:, None] * DIM + dims[None, :]
    mine = (index < GROUP)[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + token * q_stride + at_heads, mask=mine, other=0.0).to(COMPUTE)
    highest = tl.full((GROUP_BLOCK,), -1e30, tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    acc = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    k_head, v_head = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
    for place in range(top):
        number = tl.load(chosen + (token * tl.num_programs(0) + kv_head) * top + place).to(tl.int32)
        begin = tl.maximum(number, 0) * BLOCK
        end = tl.where(number < 0, begin, tl.minimum(begin + BLOCK, length))
        for start in range(begin, end, TILE):
            at = start + tl.arange(0, TILE)
            seen = at < end
            page = tl.load(tables + row * table_stride + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            inside, mask = at % BLOCK_SIZE * DIM, seen[:, None] & (dims < DIM)[None, :]
            keys = tl.load(k_head + (page * k_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
            scores = tl.dot(query, tl.trans(keys.to(COMPUTE)), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            before, highest = highest, tl.maximum(highest, tl.max(scores, 1))
            fade, weights = tl.exp2(before - highest), tl.exp2(scores - highest[:, None])
            total = total * fade + tl.sum(weights, 1)
            values = tl.load(v_head + (page * v_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
            acc = tl.dot(weights.to(COMPUTE), values.to(COMPUTE), acc * fade[:, None], input_precision="ieee")
    acc = acc * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(out + token * out_stride + at_heads, acc.to(out.dtype.element_ty), mask=mine)


def launch_block_choice(
    q: Tensor, keys: Tensor, step: PackedRows, spec: BlockIndexSpec, *, max_query: int, max_kv: int
) -> Tensor:
    """The contract of `block_choice`, without waiting for the device.

    Args:
        max_query, max_kv: upper bounds of the rows' lengths.
    """
    tokens, num_heads, dim = q.shape
    num_blocks = -(-max_kv // spec.block)
    assert q.stride()[1:] == (dim, 1) and keys.stride()[1:] == (dim, 1)
    out = torch.full((tokens, num_heads, spec.top), -1, dtype=torch.int64, device=q.device)
    count = max(1, min(tokens, MAX_SCORE_BYTES // (4 * num_heads * num_blocks)))
    per_program = min(TOKENS, power_of_2(max_query))
    for first in range(0, tokens, count):
        end = min(first + count, tokens)
        scores = torch.full((end - first, num_heads, num_blocks), -torch.inf, device=q.device)
        grid(_block_score_kernel, num_blocks, step.kv_lens.shape[0], -(-max_query // per_program))(
            q, keys, scores, step.block_tables, step.kv_lens, step.query_starts,
            q.stride(0), keys.stride(0), step.block_tables.stride(0), first, end, num_blocks,
            NUM_HEADS=num_heads, HEADS_BLOCK=max(16, power_of_2(num_heads)), DIM=dim,
            DIM_BLOCK=max(16, power_of_2(dim)), BLOCK_SIZE=step.block_size, BLOCK=spec.block,
            TILE=_tile(spec.block), TOKENS=per_program,
            COMPUTE=compute_dtype(q, is_fp8=keys.dtype == FP8), num_warps=4,
        )  # fmt: skip
        forced = spec.forced(step.positions[first:end]).clamp(max=num_blocks - 1)
        scores.scatter_(-1, forced[:, None].expand(-1, num_heads, -1), torch.inf)
        found = scores.topk(min(spec.top, num_blocks), -1)
        out[first:end, :, : found.indices.shape[-1]] = found.indices.where(found.values > -torch.inf, -1)
    return out


def launch_sparse_attention(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, step: PackedRows, spec: HeadsSpec, *, chosen: Tensor, block: int
) -> Tensor:
    """The contract of `sparse_attention`, without waiting for the device."""
    tokens, num_heads, dim = q.shape
    num_kv_heads, is_fp8 = cache_k.shape[1], cache_k.dtype == FP8
    assert spec.window is None and spec.soft_cap is None and spec.sinks is None and chosen.is_contiguous()
    out = torch.empty((tokens, num_heads, dim), dtype=q.dtype, device=q.device)
    at = torch.arange(tokens, dtype=step.query_starts.dtype, device=q.device)
    # Tokens behind the last row pad a captured step; what they read is a real row's.
    rows = torch.searchsorted(step.query_starts[1:], at, right=True).clamp(max=step.kv_lens.shape[0] - 1)
    group = num_heads // num_kv_heads
    grid(_sparse_kernel, num_kv_heads, tokens)(
        q, cache_k, cache_v, out, chosen, rows, step.positions, step.block_tables, step.kv_lens,
        spec.scale * (spec.k_scale if is_fp8 else 1.0) * LOG2_E, spec.v_scale if is_fp8 else 1.0,
        *strides(q, out, cache_k, cache_v), step.block_tables.stride(0), chosen.shape[-1],
        GROUP=group, GROUP_BLOCK=max(16, power_of_2(group)), DIM=dim, DIM_BLOCK=max(16, power_of_2(dim)),
        BLOCK_SIZE=step.block_size, BLOCK=block, TILE=_tile(block), COMPUTE=compute_dtype(q, is_fp8=is_fp8),
        num_warps=4,
    )  # fmt: skip
    return out


def _tile(block: int) -> int:
    return min(TILE, max(16, power_of_2(block)))
