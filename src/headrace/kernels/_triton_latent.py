"""Latent attention over a paged cache, keys' and values' functions absorbed: the kernels of `latent_attention`.

All query heads read the same vectors, so a program takes a tile of (token, head) pairs of one row, and a vector that it
loads is both key and value. Rows of one token are cut in parts as in the decode kernel of attention over heads. Long
prompts are in `_triton_unfolded.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels._triton_decode import LOG2_E, MAX_SPLITS, compute_dtype
from headrace.kernels._triton_rope import _to_cache
from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

MAX_PAIRS = 64
"""(token, head) pairs of a program, at most."""
WRITE_HEADS, MANY_WRITE_HEADS = 16, 64
"""Query heads that one program turns; in steps of many tokens."""
MANY_TOKENS = 512
PART_ENDS = 4
"""Numbers behind the values of a part: maximum, sum, two that keep the next one aligned."""
PROCESSORS, TARGET_PROGRAMS, BALANCING_SPLITS = 132, 1024, 8
FEW_PROGRAMS, FEW_PART_TOKENS, PART_TOKENS = 8, 64, 256
"""With so few programs, fewest tokens of a part; with more."""
MANY_SPLITS, LONG_PART_TOKENS = 16384, 2048
"""With so many that all processors have some, only very long contexts are cut."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """How contexts are cut, and where parts are kept. Shared by all layers of a group, which run one after another."""

    num_splits: int
    min_part: int
    """Fewest tokens of a part."""
    partial: Tensor  # [rows, heads, splits, rank + PART_ENDS] float32
    counts: Tensor  # [rows, head tiles] int32: parts of a row's context


@triton.jit
def _turn(
    source,
    target,
    cos,
    sin,
    is_row,
    inverse_scale,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Turn rows of HALF pairs of features, maybe in place. source, target: [n, 1] pointers. is_row: [n, 1]"""
    own: tl.constexpr = source.dtype.element_ty
    stored: tl.constexpr = target.dtype.element_ty
    if INTERLEAVED:
        # Neighbours at once: every other feature alone would be two bytes a thread and access.
        dims = tl.arange(0, 2 * PAIRS)
        mask = is_row & (dims < 2 * HALF)[None, :]
        both = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PAIRS, 2)))
        new = tl.join(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
        values = tl.reshape(new, (both.shape[0], 2 * PAIRS)).to(own)
        tl.store(target + dims[None, :], _to_cache(values, inverse_scale, stored, IS_FP8), mask=mask)
    else:
        pairs = tl.arange(0, PAIRS)
        mask = is_row & (pairs < HALF)[None, :]
        a = tl.load(source + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        new_a = (a * cos[None, :] - b * sin[None, :]).to(own)
        new_b = (b * cos[None, :] + a * sin[None, :]).to(own)
        tl.store(target + pairs[None, :], _to_cache(new_a, inverse_scale, stored, IS_FP8), mask=mask)
        tl.store(target + HALF + pairs[None, :], _to_cache(new_b, inverse_scale, stored, IS_FP8), mask=mask)


@triton.jit
def _latent_write_kernel(
    q,
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
    c = tl.load(cos + token * cos_stride + pairs, mask=pairs < TURNED, other=1.0)
    s = tl.load(sin + token * cos_stride + pairs, mask=pairs < TURNED, other=0.0)
    if HALF > 0:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        source = q + token * q_stride + heads * (NOPE + 2 * HALF) + NOPE
        _turn(source, source, c, s, heads < NUM_HEADS, 1.0, HALF, INTERLEAVED, HALF_BLOCK, False)
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
        source = k_rope + token * rope_stride + one
        _turn(source, place + RANK + one, c, s, one == 0, inverse_scale, HALF, INTERLEAVED, HALF_BLOCK, IS_FP8)
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
    interleaved: bool,
    index_k: Tensor | None = None,
    index_keys: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Turn queries and keys, write this step's vectors.

    Args:
        q: [tokens, heads, nope_dim + rope_dim], heads contiguous, whose last `rope_dim` features are turned in place.
        latent: [tokens, rank].
        k_rope: [tokens, rope_dim], which may be 0. cos, sin: [tokens, rope_dim / 2], or of no features: none turns.
        cache: [num_blocks, block_size, rank + rope_dim]; FP8 entries are divided by `scale`, saturated.
        index_k: [tokens, index dim], written to `index_keys` as it is.
    """
    tokens, num_heads, q_dim = q.shape
    if not tokens:
        return
    rank, rope_dim = latent.shape[1], k_rope.shape[1]
    assert q.stride()[1:] == (q_dim, 1) and cache.stride()[1:] == (rank + rope_dim, 1)
    assert latent.stride(1) == 1 and cos.stride() == sin.stride()
    assert not rope_dim or (k_rope.stride(1) == cos.stride(1) == 1 and cos.shape[1] in (0, rope_dim // 2))
    index_dim = 0 if index_k is None else index_k.shape[1]
    assert index_k is None or (index_keys is not None and index_k.stride(1) == 1)
    most = WRITE_HEADS if tokens < MANY_TOKENS else MANY_WRITE_HEADS
    grid(_latent_write_kernel, tokens, -(-num_heads // most))(
        q,
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
        latent.stride(0),
        k_rope.stride(0),
        0 if index_k is None else index_k.stride(0),
        cos.stride(0),
        cache.stride(0),
        0 if index_keys is None else index_keys.stride(0),
        BLOCK_SIZE=cache.shape[1],
        INTERLEAVED=interleaved,
        IS_FP8=cache.dtype == FP8,
        HEADS=min(most, power_of_2(num_heads)),
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
    }


@triton.jit(do_not_specialize=["first_row", "first_token", "num_splits"])
def _merge_kernel(
    partial,
    counts,
    out,
    query_starts,
    v_scale,
    out_stride,
    first_row,
    first_token,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (heads, rows). What the parts of a row's context gave, as one; nothing where it was one part."""
    wait_for_predecessor(CHAINED)
    head, row = tl.program_id(0), tl.program_id(1)
    num_parts = tl.load(counts + row * ((NUM_HEADS + HEADS - 1) // HEADS) + head // HEADS)
    if num_parts <= 1:
        return
    place = partial + ((row * NUM_HEADS + head) * num_splits).to(tl.int64) * PART
    parts, dims = tl.arange(0, MAX_PARTS), tl.arange(0, RANK_BLOCK)
    there = parts < num_parts
    peaks = tl.load(place + parts * PART + RANK, mask=there, other=float("-inf"))
    highest = tl.maximum(tl.max(peaks, 0), -1e30)
    shares = tl.load(place + parts * PART + RANK + 1, mask=there, other=0.0)
    total = tl.sum(shares * tl.exp2(peaks - highest), 0)
    acc = tl.zeros((RANK_BLOCK,), tl.float32)
    for base in range(0, num_parts, 8):
        at = base + tl.arange(0, 8)
        known = at < num_parts
        weights = tl.exp2(tl.load(place + at * PART + RANK, mask=known, other=float("-inf")) - highest)
        inside = known[:, None] & (dims < RANK)[None, :]
        values = tl.load(place + at[:, None] * PART + dims[None, :], mask=inside, other=0.0)
        acc += tl.sum(values * weights[:, None], 0)
    result = (acc * (v_scale / tl.where(total > 0.0, total, 1.0))).to(out.dtype.element_ty)
    token = tl.load(query_starts + first_row + row).to(tl.int64) - first_token
    tl.store(out + token * out_stride + head * RANK + dims, result, mask=dims < RANK)


@triton.jit(
    do_not_specialize=["first_row", "first_token", "window", "sink_tokens", "num_splits", "min_part", "table_stride"]
)
def _latent_kernel(
    q,
    turned_q,
    cache,
    out,
    chosen,
    tables,
    kv_lens,
    query_starts,
    partial,
    counts,
    scale,
    v_scale,
    q_stride,
    turned_stride,
    out_stride,
    block_stride,
    chosen_stride,
    table_stride,
    first_row,
    first_token,
    window,
    sink_tokens,
    num_splits,
    min_part,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    NOPE: tl.constexpr,
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
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (tiles of TOKENS tokens by parts of HEADS heads, rows, parts of the context). q and out begin with the
    step's token first_token."""
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
    at_query = (packed - first_token) * q_stride + heads * RANK
    rank_mask, rope_mask = mask[:, None] & (dims < RANK)[None, :], mask[:, None] & (turns < ROPE)[None, :]
    query = tl.load(q + at_query[:, None] + dims[None, :], mask=rank_mask, other=0.0).to(COMPUTE)
    if ROPE > 0:
        at_turned = turned_q + packed * turned_stride + heads * (NOPE + ROPE) + NOPE
        query_rope = tl.load(at_turned[:, None] + turns[None, :], mask=rope_mask, other=0.0).to(COMPUTE)

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
        if split == 0:
            tl.store(counts + row * HEAD_TILES + head_tile, num_parts)
        if num_parts > 1:
            mine = partial + ((row * NUM_HEADS + heads) * num_splits + split).to(tl.int64) * PART
            tl.store(mine[:, None] + dims[None, :], acc, mask=rank_mask)
            tl.store(mine + RANK, highest, mask=mask)
            tl.store(mine + RANK + 1, total, mask=mask)
            return
    acc = acc * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    target = out + ((packed - first_token) * out_stride + heads * RANK)[:, None] + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=rank_mask)


def launch_latent(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    out: Tensor,
    scale: float,
    rows: tuple[int, int],
    first_token: int = 0,
    max_query: int,
    window: int | None = None,
    sink_tokens: int = 0,
    cache_scale: float = 1.0,
    chosen: Tensor | None = None,
    plan: LatentPlan | None = None,
) -> None:
    """The contract of `latent_attention`, for some rows.

    Args:
        q: [some tokens, heads, rank] contiguous, keys' function absorbed.
        turned: [all tokens, heads, nope_dim + rope_dim], heads contiguous, whose last features are turned.
        out: [some tokens, heads, rank] contiguous, to write to.
        rows: [first, end) of those that attend.
        first_token: of the step, where q and out begin.
        max_query: an upper bound of these rows' numbers of tokens; 1 with a plan.
        chosen: [tokens, k] int64; those of a token come first, -1 behind them.
        plan: how contexts are cut, with one token a row.
    """
    first, num_rows = rows[0], rows[1] - rows[0]
    if num_rows <= 0 or max_query <= 0:
        return
    num_heads, rank = q.shape[1:]
    width, q_dim = cache.shape[2], turned.shape[2]
    assert q.is_contiguous() and out.is_contiguous()
    assert turned.stride()[1:] == (q_dim, 1) and cache.stride()[1:] == (width, 1)
    assert chosen is None or chosen.stride(1) == 1
    is_fp8, num_splits = cache.dtype == FP8, 1 if plan is None else plan.num_splits
    v_scale = cache_scale if is_fp8 else 1.0
    _, tile, warps, stages = tuned(num_heads, rank, q.dtype)
    heads, tokens = _dealt(num_heads, rank, q.dtype, is_single=plan is not None or chosen is not None)
    num_tiles = -(-max_query // tokens) * -(-num_heads // heads)
    grid(_latent_kernel, num_tiles, num_rows, num_splits)(
        q, turned, cache, out, q if chosen is None else chosen, step.block_tables, step.kv_lens, step.query_starts,
        out if plan is None else plan.partial, out if plan is None else plan.counts,
        scale * v_scale * LOG2_E, v_scale, q.stride(0), turned.stride(0), out.stride(0), cache.stride(0),
        0 if chosen is None else chosen.stride(0), step.block_tables.stride(0), first, first_token,
        window or 0, sink_tokens, num_splits, 1 if plan is None else plan.min_part,
        HEADS=heads, TOKENS=tokens, TILE=tile, STAGES=stages, BLOCK_SIZE=step.block_size,
        TOP=0 if chosen is None else chosen.shape[1],
        IS_SPLIT=num_splits > 1,
        HAS_WINDOW=window is not None,
        HAS_SINK_TOKENS=window is not None and sink_tokens > 0,
        COMPUTE=compute_dtype(q, is_fp8=is_fp8),
        PART=rank + PART_ENDS,
        **_attend_sizes(num_heads, q_dim - (width - rank), rank, width - rank),
        **chain_options(q, warps),
    )  # fmt: skip
    if plan is not None and num_splits > 1:
        _launch_merge(plan, out, step, first_row=first, first_token=first_token, heads=heads, v_scale=v_scale)


def _launch_merge(
    plan: LatentPlan, out: Tensor, step: PackedRows, *, first_row: int, first_token: int, heads: int, v_scale: float
) -> None:
    """heads: of a program of the attending kernel."""
    num_rows, num_heads, num_splits = plan.partial.shape[:3]
    rank = out.shape[2]
    grid(_merge_kernel, num_heads, num_rows)(
        plan.partial, plan.counts, out, step.query_starts, v_scale, out.stride(0), first_row, first_token, num_splits,
        NUM_HEADS=num_heads, HEADS=heads, RANK=rank, RANK_BLOCK=power_of_2(rank), PART=rank + PART_ENDS,
        MAX_PARTS=MAX_SPLITS, **chain_options(out, 4),
    )  # fmt: skip


def _attend_sizes(num_heads: int, nope_dim: int, rank: int, rope_dim: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "NOPE": nope_dim,
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
) -> LatentPlan:
    """How the contexts of rows with one token are cut. max_kv: an upper bound of what a query reads.

    With few rows into parts for all processors, which hold a program each; with many so that long rows don't keep
    the others waiting.
    """
    head_tiles = -(-num_heads // tuned(num_heads, rank, dtype)[0])
    programs = max(1, num_rows * head_tiles)
    min_part = FEW_PART_TOKENS if programs <= FEW_PROGRAMS else PART_TOKENS
    num_splits = max(-(-2 * PROCESSORS // programs), min(BALANCING_SPLITS, TARGET_PROGRAMS // programs))
    if 2 * programs > TARGET_PROGRAMS:
        num_splits, min_part = MANY_SPLITS // programs, LONG_PART_TOKENS
    num_splits = max(1, min(num_splits, MAX_SPLITS, -(-max_kv // min_part)))
    rows = num_rows if num_splits > 1 else 0
    return LatentPlan(
        num_splits,
        min_part,
        torch.empty((rows, num_heads, num_splits, rank + PART_ENDS), dtype=torch.float32, device=device),
        torch.empty((rows, head_tiles), dtype=torch.int32, device=device),
    )


def tuned(num_heads: int, rank: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(pairs, tile, warps, stages) of a program. Chosen by what fits in a processor, not measured: 64 pairs of 512
    values are 128 registers a thread of 8 warps, three tiles of 32 vectors 108 KiB of shared memory beside the queries.
    Places come from a table, which takes stages too: with fewer than five no tile is read while another is worked on.
    """
    if dtype == torch.float32:
        return (16, 16, 4, 1) if rank > 128 else (MAX_PAIRS, 32, 4, 1)
    return (MAX_PAIRS, 32, 8, 5) if num_heads > 16 else (32, 32, 4, 5)
