"""Latent attention over a paged cache, keys' and values' functions absorbed: the kernels of `latent_attention`.

All query heads read the same vectors, so a program takes a tile of (token, head) pairs of one row, and a vector that it
loads is both key and value. Rows of one token are cut in parts as in the decode kernel of attention over heads. For
long prompts that have little in the cache, unfolding keys and values would cost less than a third of the operations
(DeepSeek-V3: 192 + 128 a pair of tokens and head instead of 576 + 512); nothing here does that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels._triton_decode import LOG2_E, MAX_SPLITS, DecodePlan, compute_dtype, plan_decode
from headrace.kernels._triton_rope import _to_cache
from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

MAX_PAIRS = 64
"""(token, head) pairs of a program, at most."""
WRITE_HEADS = 16
"""Query heads that one program turns."""


@triton.jit
def _turned(source, cos, sin, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """Features first and second of each pair, turned. source: [n, 1] pointers of heads. -> places, places, values"""
    pairs = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + HALF
    a = tl.load(source + first[None, :], mask=mask, other=0.0)
    b = tl.load(source + second[None, :], mask=mask, other=0.0)
    own = a.dtype
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    new_a = (wide_a * cos[None, :] - wide_b * sin[None, :]).to(own)
    new_b = (wide_b * cos[None, :] + wide_a * sin[None, :]).to(own)
    return first, second, new_a, new_b


@triton.jit
def _latent_write_kernel(
    q,
    absorbed,
    latent,
    k_rope,
    index_k,
    cos,
    sin,
    write_slots,
    cache,
    index_keys,
    inverse_scale,
    q_stride,
    absorbed_stride,
    latent_stride,
    rope_stride,
    index_stride,
    cos_stride,
    block_stride,
    index_block_stride,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_FP8: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (tokens, parts of HEADS query heads). The first part writes to the cache. The first TURNED of HALF
    pairs of features are turned."""
    wait_for_predecessor(CHAINED)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WIDTH: tl.constexpr = RANK + 2 * HALF
    pairs = tl.arange(0, HALF_BLOCK)
    pair_mask = pairs < HALF
    c = tl.load(cos + token * cos_stride + pairs, mask=pairs < TURNED, other=1.0)
    s = tl.load(sin + token * cos_stride + pairs, mask=pairs < TURNED, other=0.0)
    if HALF > 0:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & pair_mask[None, :]
        source = q + token * q_stride + heads[:, None] * (NOPE + 2 * HALF) + NOPE
        first, second, a, b = _turned(source, c, s, mask, HALF, INTERLEAVED, HALF_BLOCK)
        target = absorbed + token * absorbed_stride + heads[:, None] * WIDTH + RANK
        tl.store(target + first[None, :], a, mask=mask)
        tl.store(target + second[None, :], b, mask=mask)
    if part > 0:
        return

    stored: tl.constexpr = cache.dtype.element_ty
    slot = tl.load(write_slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    place = cache + block * block_stride + offset * WIDTH
    dims = tl.arange(0, RANK_BLOCK)
    values = tl.load(latent + token * latent_stride + dims, mask=dims < RANK, other=0.0)
    tl.store(place + dims, _to_cache(values, inverse_scale, stored, IS_FP8), mask=dims < RANK)
    if HALF > 0:
        one = tl.zeros((1, 1), tl.int64)
        key_mask = (one == 0) & pair_mask[None, :]
        first, second, a, b = _turned(k_rope + token * rope_stride + one, c, s, key_mask, HALF, INTERLEAVED, HALF_BLOCK)
        tl.store(place + RANK + one + first[None, :], _to_cache(a, inverse_scale, stored, IS_FP8), mask=key_mask)
        tl.store(place + RANK + one + second[None, :], _to_cache(b, inverse_scale, stored, IS_FP8), mask=key_mask)
    if INDEX_DIM > 0:
        dims = tl.arange(0, INDEX_BLOCK)
        keys = tl.load(index_k + token * index_stride + dims, mask=dims < INDEX_DIM, other=0.0)
        place = index_keys + block * index_block_stride + offset * INDEX_DIM
        tl.store(place + dims, _to_cache(keys, 1.0, index_keys.dtype.element_ty, IS_FP8), mask=dims < INDEX_DIM)


def launch_latent_write(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    write_slots: Tensor,
    *,
    absorbed: Tensor,
    interleaved: bool,
    index_k: Tensor | None = None,
    index_keys: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Turn queries and keys, write this step's vectors.

    Args:
        q: [tokens, heads, nope_dim + rope_dim], heads contiguous.
        latent: [tokens, rank].
        k_rope: [tokens, rope_dim], which may be 0. cos, sin: [tokens, rope_dim / 2], or of no features: none turns.
        cache: [num_blocks, block_size, rank + rope_dim]; FP8 entries are divided by `scale`, saturated.
        absorbed: [tokens, heads, rank + rope_dim], whose last `rope_dim` features are written.
        index_k: [tokens, index dim], written to `index_keys` as it is.
    """
    tokens, num_heads, q_dim = q.shape
    if not tokens:
        return
    rank, rope_dim = latent.shape[1], k_rope.shape[1]
    assert q.stride()[1:] == (q_dim, 1) and absorbed.is_contiguous() and cache.stride()[1:] == (rank + rope_dim, 1)
    assert latent.stride(1) == 1 and cos.stride() == sin.stride()
    assert not rope_dim or (k_rope.stride(1) == cos.stride(1) == 1 and cos.shape[1] in (0, rope_dim // 2))
    index_dim = 0 if index_k is None else index_k.shape[1]
    assert index_k is None or (index_keys is not None and index_k.stride(1) == 1)
    grid(_latent_write_kernel, tokens, -(-num_heads // WRITE_HEADS))(
        q,
        absorbed,
        latent,
        k_rope,
        latent if index_k is None else index_k,
        cos,
        sin,
        write_slots,
        cache,
        cache if index_keys is None else index_keys,
        1.0 / scale,
        q.stride(0),
        absorbed.stride(0),
        latent.stride(0),
        k_rope.stride(0),
        0 if index_k is None else index_k.stride(0),
        cos.stride(0),
        cache.stride(0),
        0 if index_keys is None else index_keys.stride(0),
        BLOCK_SIZE=cache.shape[1],
        INTERLEAVED=interleaved,
        IS_FP8=cache.dtype == FP8,
        **_write_sizes(num_heads, q_dim - rope_dim, rank, rope_dim, index_dim, cos.shape[1]),
        **chain_options(q, 4),
    )


def _write_sizes(
    num_heads: int, nope_dim: int, rank: int, rope_dim: int, index_dim: int, num_turned: int
) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "NOPE": nope_dim,
        "RANK": rank,
        "HALF": rope_dim // 2,
        "TURNED": num_turned,
        "INDEX_DIM": index_dim,
        "RANK_BLOCK": power_of_2(rank),
        "HALF_BLOCK": power_of_2(rope_dim // 2),
        "INDEX_BLOCK": power_of_2(max(index_dim, 1)),
        "HEADS": min(WRITE_HEADS, power_of_2(num_heads)),
    }


@triton.jit
def _merge_parts(
    target,
    place,
    num_parts,
    mask,
    v_scale,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """target, place: [PAIRS] each one's result, and its first part: RANK weighted values, then maximum and sum. Some
    features at a time: all of them, of several parts, are more than the registers."""
    DIMS: tl.constexpr = min(RANK_BLOCK, 64)
    parts = tl.arange(0, MAX_PARTS)
    ends = place[:, None] + parts[None, :] * (RANK + 2) + RANK
    there = mask[:, None] & (parts < num_parts)[None, :]
    peaks = tl.load(ends, mask=there, other=float("-inf"), cache_modifier=".cg")
    highest = tl.maximum(tl.max(peaks, 1), -1e30)
    shares = tl.load(ends + 1, mask=there, other=0.0, cache_modifier=".cg")
    total = tl.sum(shares * tl.exp2(peaks - highest[:, None]), 1)
    factor = v_scale / tl.where(total > 0.0, total, 1.0)
    for first in range(0, RANK, DIMS):
        dims = first + tl.arange(0, DIMS)
        is_dim = dims < RANK
        acc = tl.zeros((PAIRS, DIMS), tl.float32)
        for base in range(0, num_parts, UNROLLED):
            # Loads that don't wait for each other: a part at a time would be a memory latency each.
            for step in tl.static_range(UNROLLED):
                present = tl.where(base + step < num_parts, mask, False)
                at = place + (base + step) * (RANK + 2)
                peak = tl.load(at + RANK, mask=present, other=float("-inf"), cache_modifier=".cg")
                inside = present[:, None] & is_dim[None, :]
                values = tl.load(at[:, None] + dims[None, :], mask=inside, other=0.0, cache_modifier=".cg")
                acc += values * tl.exp2(peak - highest)[:, None]
        result = (acc * factor[:, None]).to(target.dtype.element_ty)
        tl.store(target[:, None] + dims[None, :], result, mask=mask[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["first_row", "window", "sink_tokens", "num_splits", "min_part", "table_stride"])
def _latent_kernel(
    q,
    cache,
    out,
    chosen,
    tables,
    kv_lens,
    query_starts,
    partial,
    arrived,
    scale,
    v_scale,
    q_stride,
    out_stride,
    block_stride,
    chosen_stride,
    table_stride,
    first_row,
    window,
    sink_tokens,
    num_splits,
    min_part,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK_TOKENS: tl.constexpr,
    COMPUTE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    UNROLLED: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (tiles of TOKENS tokens by parts of HEADS heads, rows, parts of the context)."""
    wait_for_predecessor(CHAINED)
    row, split = tl.program_id(1), tl.program_id(2)
    HEAD_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    WIDTH: tl.constexpr = RANK + ROPE
    # Late tokens, which see the most, go first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    query_start = tl.load(query_starts + first_row + row)
    num_tokens = tl.load(query_starts + first_row + row + 1) - query_start
    if tile * TOKENS >= num_tokens:
        return
    kv_len = tl.load(kv_lens + first_row + row)
    index = tl.arange(0, TOKENS * HEADS)
    token = tile * TOKENS + index // HEADS
    heads = head_tile * HEADS + index % HEADS
    mask = (token < num_tokens) & (heads < NUM_HEADS)
    base = kv_len - num_tokens
    positions = base + tl.minimum(token, num_tokens - 1)
    packed = (query_start + token).to(tl.int64)
    dims, turns = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    at_query = packed * q_stride + heads * WIDTH
    rank_mask, rope_mask = mask[:, None] & (dims < RANK)[None, :], mask[:, None] & (turns < ROPE)[None, :]
    query = tl.load(q + at_query[:, None] + dims[None, :], mask=rank_mask, other=0.0).to(COMPUTE)
    if ROPE > 0:
        query_rope = tl.load(q + RANK + at_query[:, None] + turns[None, :], mask=rope_mask, other=0.0).to(COMPUTE)

    first_position = base + tile * TOKENS
    last = tl.minimum(first_position + TOKENS, kv_len) - 1
    begin, length = 0, last + 1
    if TOP > 0:
        length = tl.minimum(length, TOP)
        chosen += (query_start + tile * TOKENS).to(tl.int64) * chosen_stride
    elif HAS_WINDOW:
        if not HAS_SINK_TOKENS:
            begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    part = length - begin
    if IS_SPLIT:
        part = tl.maximum(tl.cdiv(tl.cdiv(part, num_splits), TILE) * TILE, min_part)
    num_parts = tl.maximum(tl.cdiv(length - begin, tl.maximum(part, 1)), 1)
    if split >= num_parts:
        return
    begin += split * part
    end = tl.minimum(begin + part, length)

    highest = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    acc = tl.zeros((TOKENS * HEADS, RANK_BLOCK), tl.float32)
    table = tables + (first_row + row).to(tl.int64) * table_stride
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        place = start + tl.arange(0, TILE)
        known = place < end
        if TOP > 0:
            at = tl.load(chosen + place, mask=known, other=-1).to(tl.int32)
            known = known & (at >= 0) & (at <= last)
        else:
            at = place
        if HAS_WINDOW:
            # Blocks that every query's window has left may be gone.
            inside = at > first_position - window
            if HAS_SINK_TOKENS:
                inside = inside | (at < sink_tokens)
            known = known & inside
        block = tl.load(table + at // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        at_key = block * block_stride + at % BLOCK_SIZE * WIDTH
        vectors = tl.load(
            cache + at_key[:, None] + dims[None, :], mask=known[:, None] & (dims < RANK)[None, :], other=0.0
        ).to(COMPUTE)
        if ROPE > 0:
            turned = tl.load(
                cache + RANK + at_key[:, None] + turns[None, :],
                mask=known[:, None] & (turns < ROPE)[None, :],
                other=0.0,
            ).to(COMPUTE)
        scores = tl.dot(query, tl.trans(vectors), input_precision="ieee")
        if ROPE > 0:
            scores = tl.dot(query_rope, tl.trans(turned), scores, input_precision="ieee")
        scores *= scale
        seen = known[None, :] & (at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            inside = at[None, :] > positions[:, None] - window
            if HAS_SINK_TOKENS:
                inside = inside | (at < sink_tokens)[None, :]
            seen = seen & inside
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query that has seen nothing yet stays at -inf, and -inf - -inf is no number.
        floor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        fade, weights = tl.exp2(highest - floor), tl.exp2(scores - floor[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(COMPUTE), vectors, acc * fade[:, None], input_precision="ieee")
        highest = new_highest

    if IS_SPLIT:
        if num_parts > 1:
            first_part = partial + ((row * NUM_HEADS + heads) * num_splits).to(tl.int64) * (RANK + 2)
            mine = first_part + split * (RANK + 2)
            tl.store(mine[:, None] + dims[None, :], acc, mask=rank_mask)
            tl.store(mine + RANK, highest, mask=mask)
            tl.store(mine + RANK + 1, total, mask=mask)
            # The barrier orders every thread's stores before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrived + row * HEAD_TILES + head_tile, 1, sem="acq_rel") < num_parts - 1:
                return
            tl.store(arrived + row * HEAD_TILES + head_tile, 0)
            tl.debug_barrier()
            _merge_parts(
                out + packed * out_stride + heads * RANK, first_part, num_parts, mask, v_scale,
                RANK, RANK_BLOCK, TOKENS * HEADS, MAX_PARTS, UNROLLED,
            )  # fmt: skip
            return
    acc = acc * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    target = out + (packed * out_stride + heads * RANK)[:, None] + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=rank_mask)


def launch_latent(
    q: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    out: Tensor,
    scale: float,
    rows: tuple[int, int],
    max_query: int,
    window: int | None = None,
    sink_tokens: int = 0,
    cache_scale: float = 1.0,
    chosen: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> None:
    """The contract of `latent_attention`, for some rows.

    Args:
        q: [tokens, heads, rank + rope_dim] contiguous.
        out: [tokens, heads, rank] contiguous, to write to.
        rows: [first, end) of those that attend.
        max_query: an upper bound of these rows' numbers of tokens; 1 with a plan.
        chosen: [tokens, k] int64; those of a token come first, -1 behind them.
        plan: how contexts are cut, with one token a row.
    """
    first, num_rows = rows[0], rows[1] - rows[0]
    if num_rows <= 0 or max_query <= 0:
        return
    num_heads, width = q.shape[1:]
    rank = out.shape[2]
    assert q.is_contiguous() and out.is_contiguous() and cache.stride()[1:] == (width, 1)
    assert chosen is None or chosen.stride(1) == 1
    is_fp8, num_splits = cache.dtype == FP8, 1 if plan is None else plan.num_splits
    _, tile, warps, stages = tuned(num_heads, rank, q.dtype)
    heads, tokens = _dealt(num_heads, rank, q.dtype, is_single=plan is not None or chosen is not None)
    num_tiles = -(-max_query // tokens) * -(-num_heads // heads)
    grid(_latent_kernel, num_tiles, num_rows, num_splits)(
        q, cache, out, q if chosen is None else chosen, step.block_tables, step.kv_lens, step.query_starts,
        out if plan is None else plan.partial, out if plan is None else plan.arrived,
        scale * (cache_scale if is_fp8 else 1.0) * LOG2_E, cache_scale if is_fp8 else 1.0,
        q.stride(0), out.stride(0), cache.stride(0), 0 if chosen is None else chosen.stride(0),
        step.block_tables.stride(0), first, window or 0, sink_tokens, num_splits, 1 if plan is None else plan.min_part,
        HEADS=heads,
        TOKENS=tokens,
        TOP=0 if chosen is None else chosen.shape[1],
        BLOCK_SIZE=step.block_size,
        TILE=tile,
        IS_SPLIT=num_splits > 1,
        HAS_WINDOW=window is not None,
        HAS_SINK_TOKENS=window is not None and sink_tokens > 0,
        COMPUTE=compute_dtype(q, is_fp8=is_fp8),
        MAX_PARTS=MAX_SPLITS,
        UNROLLED=4 if q.is_cuda else 1,
        STAGES=stages,
        **_attend_sizes(num_heads, rank, width - rank),
        **chain_options(q, warps),
    )  # fmt: skip


def _attend_sizes(num_heads: int, rank: int, rope_dim: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "RANK": rank,
        "ROPE": rope_dim,
        "RANK_BLOCK": max(16, power_of_2(rank)),
        "ROPE_BLOCK": max(16, power_of_2(rope_dim)),
    }


def _dealt(num_heads: int, rank: int, dtype: torch.dtype, *, is_single: bool) -> tuple[int, int]:
    """(heads, tokens) of a program. is_single: of one token, and then of 16 heads at least, for tensor cores."""
    pairs = tuned(num_heads, rank, dtype)[0]
    heads = min(pairs, power_of_2(num_heads))
    return (max(16, heads), 1) if is_single else (heads, pairs // heads)


def plan_latent(
    num_rows: int, num_heads: int, rank: int, *, dtype: torch.dtype, max_kv: int, device: torch.device
) -> DecodePlan:
    """How the contexts of rows with one token are cut. max_kv: an upper bound of what a query reads."""
    head_tiles = -(-num_heads // tuned(num_heads, rank, dtype)[0])
    return plan_decode(num_rows, num_heads, head_tiles, rank, max_kv=max_kv, device=device)


def tuned(num_heads: int, rank: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(pairs, tile, warps, stages) of a program. Chosen by what fits in a processor, not measured: 64 pairs of 512
    values are 128 registers a thread of 8 warps, two tiles of 32 vectors 72 KiB of shared memory beside the queries.
    """
    if dtype == torch.float32:
        return (16, 16, 4, 1) if rank > 128 else (MAX_PAIRS, 32, 4, 1)
    return (MAX_PAIRS, 32, 8, 2) if num_heads > 16 else (32, 32, 4, 2)
