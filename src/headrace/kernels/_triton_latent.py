"""Latent attention over a paged cache, keys' and values' functions absorbed: the kernels of `latent_attention`.

All query heads read the same vectors, so a program takes a tile of (token, head) pairs of one row, and a vector that it
loads is both key and value. Rows of one token are cut in parts (`_triton_latent_parts.py`). Long prompts are in
`_triton_unfolded.py`.
"""

from __future__ import annotations

import logging
from functools import cache as cached
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import (
    HOPPER_BYTES,
    chain_options,
    grid,
    power_of_2,
    shared_bytes,
    wait_for_predecessor,
)
from headrace.kernels._triton_decode import LOG2_E, compute_dtype
from headrace.kernels._triton_latent_parts import (
    PART_ENDS,
    LatentPlan,
    deal,
    deal_options,
    launch_merge,
    new_plan,
    part_size,
)
from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

Reads = Literal["all", "window", "chosen"]

MAX_PAIRS = 64
"""(token, head) pairs of a program, at most."""
HOPPER_DIMS = (512, 64)
"""Values and turned features of the kernel for Hopper."""

log = logging.getLogger(__name__)
_hopper_faults: list[str] = []
"""Why that kernel isn't taken, once it has failed."""


@triton.jit
def _places(
    chosen,
    table,
    start,
    limit,
    last,
    oldest,
    sink_tokens,
    TOP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK_TOKENS: tl.constexpr,
):
    """Positions of a tile's tokens and their blocks, [TILE]; -1 for what nobody sees, where some may be."""
    at = tl.minimum(start + tl.arange(0, TILE), limit)
    if TOP > 0:
        at = tl.load(chosen + at).to(tl.int32)
        at = tl.where(at <= last, at, -1)
    known = at >= 0
    if HAS_WINDOW:
        # Blocks that every query's window has left may be gone.
        inside = at > oldest
        if HAS_SINK_TOKENS:
            inside = inside | (at < sink_tokens)
        known = known & inside
    if TOP > 0 or HAS_WINDOW:
        block = tl.load(table + at // BLOCK_SIZE, mask=known, other=-1)
    else:
        block = tl.load(table + at // BLOCK_SIZE)
    return at, block


@triton.jit
def _vectors(cache, at_key, known, dims, DIM: tl.constexpr, IS_MASKED: tl.constexpr):
    """[tokens, dims], zeros where nothing is known. Unmasked where every place holds something."""
    place = cache + at_key[:, None] + dims[None, :]
    if IS_MASKED:
        return tl.load(place, mask=known[:, None] & (dims < DIM)[None, :], other=0.0)
    elif dims.shape[0] > DIM:
        return tl.load(place, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _weigh(
    query,
    query_rope,
    vectors,
    turned,
    seen,
    highest,
    totals,
    scale,
    ROPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    LATE_SUMS: tl.constexpr,
):
    """-> (weights of a tile's vectors, how much what was before fades, the highest score, the weights' sums)"""
    scores = tl.dot(query, tl.trans(vectors), input_precision="ieee")
    if ROPE > 0:
        # The compiler would make a sum the other product's, one after the other.
        more = tl.dot(query_rope, tl.trans(turned), input_precision="ieee") * scale
        scores = tl.fma(scores, tl.full(scores.shape, scale, tl.float32), more)
    else:
        scores *= scale
    scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A query that has seen nothing yet stays at -inf, and -inf - -inf is no number.
    floor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    fade, weights = tl.exp2(highest - floor), tl.exp2(scores - floor[:, None])
    if LATE_SUMS:
        totals = totals * fade[:, None] + weights
    else:
        totals = totals * fade + tl.sum(weights, 1)
    return weights.to(COMPUTE), fade, new_highest, totals


@triton.jit(
    do_not_specialize=["first_row", "first_token", "window", "sink_tokens", "num_rows", "num_parts", "table_stride"]
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
    parts,
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
    num_rows,
    num_parts,
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
    ROWS: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK_TOKENS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    SHARES_OUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (tiles of TOKENS tokens by parts of HEADS heads, rows, or parts of rows of one token where ROWS > 0). q
    and out begin with the step's token first_token."""
    wait_for_predecessor(CHAINED)
    row, mine, first_part, part = tl.program_id(1), 0, 0, 0
    if ROWS > 0:
        mine = row
        row, first_part, part = deal(
            kv_lens + first_row, num_rows, num_parts, window, mine,
            ROWS, MIN_PART, MAX_PARTS, TOP, TILE, HAS_WINDOW, HAS_SINK_TOKENS,
        )  # fmt: skip
        if row >= num_rows:
            return
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
    query_rope = query
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
    end = length
    if ROWS > 0:
        part = part_size(length - begin, part, TILE, MAX_PARTS)
        row_parts = tl.maximum(tl.cdiv(length - begin, part), 1)
        if (mine == first_part) & (tl.program_id(0) == 0):
            tl.store(parts + 2 * row, first_part)
            tl.store(parts + 2 * row + 1, row_parts)
        begin += (mine - first_part) * part
        end = tl.minimum(begin + part, length)

    highest = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
    LATE_SUMS: tl.constexpr = SHARES_OUT and TOP == 0
    totals = tl.zeros((TOKENS * HEADS, TILE) if LATE_SUMS else (TOKENS * HEADS,), tl.float32)
    acc = tl.zeros((TOKENS * HEADS, RANK_BLOCK), tl.float32)
    table = tables + (first_row + row).to(tl.int64) * table_stride
    limit = tl.maximum(end - 1, 0)
    oldest = first_position - window
    if TOP == 0:
        _, block = _places(
            chosen, table, begin, limit, last, oldest, sink_tokens, TOP, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SINK_TOKENS
        )
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        if TOP > 0:
            at, block = _places(
                chosen, table, start, limit, last, oldest, sink_tokens,
                TOP, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SINK_TOKENS,
            )  # fmt: skip
        else:
            at = tl.minimum(start + tl.arange(0, TILE), limit)
        at_key = block.to(tl.int64) * block_stride + at % BLOCK_SIZE * WIDTH
        known = (at >= 0) & (block >= 0)
        vectors = _vectors(cache, at_key, known, dims, RANK, TOP > 0 or HAS_WINDOW).to(COMPUTE)
        turned = vectors
        if ROPE > 0:
            turned = _vectors(cache + RANK, at_key, known, turns, ROPE, TOP > 0 or HAS_WINDOW).to(COMPUTE)
        place = start + tl.arange(0, TILE)
        if TOP > 0 or HAS_WINDOW:
            seen = known[None, :] & (at[None, :] <= positions[:, None]) & (place < end)[None, :]
        else:
            seen = (place < end)[None, :] & (place[None, :] <= positions[:, None])
        if HAS_WINDOW:
            inside = at[None, :] > positions[:, None] - window
            if HAS_SINK_TOKENS:
                inside = inside | (at < sink_tokens)[None, :]
            seen = seen & inside
        if TOP == 0:
            _, block = _places(
                chosen, table, start + TILE, limit, last, oldest, sink_tokens,
                TOP, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SINK_TOKENS,
            )  # fmt: skip
        if SHARES_OUT:
            # The warps share out scores that no other product is seen to use, and would all work out all of them
            # otherwise. A loop's body always begins before its end; the compiler doesn't know.
            if start < end:
                weights, fade, highest, totals = _weigh(
                    query, query_rope, vectors, turned, seen, highest, totals, scale, ROPE, COMPUTE, LATE_SUMS
                )
            else:
                weights = tl.load(q + index[:, None] * TILE + tl.arange(0, TILE)[None, :]).to(COMPUTE)
                fade = tl.load(partial + index).to(tl.float32)
                highest = fade
        else:
            weights, fade, highest, totals = _weigh(
                query, query_rope, vectors, turned, seen, highest, totals, scale, ROPE, COMPUTE, LATE_SUMS
            )
        acc = tl.dot(weights, vectors, acc * fade[:, None], input_precision="ieee")
    total = tl.sum(totals, 1) if LATE_SUMS else totals

    if ROWS > 0:
        if row_parts > 1:
            place = partial + (mine * NUM_HEADS + heads).to(tl.int64) * PART
            tl.store(place[:, None] + dims[None, :], acc, mask=rank_mask)
            tl.store(place + RANK, highest, mask=mask)
            tl.store(place + RANK + 1, total, mask=mask)
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
    if rows[1] <= rows[0] or max_query <= 0:
        return
    width, q_dim = cache.shape[2], turned.shape[2]
    assert q.is_contiguous() and out.is_contiguous()
    assert turned.stride()[1:] == (q_dim, 1) and cache.stride()[1:] == (width, 1)
    assert chosen is None or chosen.stride(1) == 1
    v_scale = cache_scale if cache.dtype == FP8 else 1.0
    common = {"out": out, "scale": scale, "rows": rows, "first_token": first_token}
    if (
        plan is None
        or chosen is not None
        or window is not None
        or not attend_on_hopper(q, turned, cache, step, plan=plan, **common)
    ):
        launch_portable(
            q, turned, cache, step, max_query=max_query, window=window, sink_tokens=sink_tokens, v_scale=v_scale,
            chosen=chosen, plan=plan, **common,
        )  # fmt: skip
    if plan is not None and plan.num_parts > 0:
        launch_merge(plan, out, step, rows=rows, first_token=first_token, v_scale=v_scale)


def attend_on_hopper(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    out: Tensor,
    scale: float,
    rows: tuple[int, int],
    first_token: int,
    plan: LatentPlan,
) -> bool:
    """Launch the kernel for Hopper if it was measured with such tensors and works here. -> whether it did"""
    num_heads, rank = q.shape[1:]
    if (rank, cache.shape[2] - rank) != HOPPER_DIMS or num_heads % MAX_PAIRS or cache.dtype != q.dtype:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or not _is_hopper(q.device) or _hopper_faults:
        return False
    try:
        from headrace.kernels._gluon_latent import launch_latent_rows

        launch_latent_rows(
            q, turned, cache, step, out=out, scale=scale, rows=rows, first_token=first_token, plan=plan
        )  # fmt: skip
    except Exception as error:  # another release of Triton may name things otherwise, or give less room
        _hopper_faults.append(f"{type(error).__name__}: {error}".splitlines()[0])
        log.info("latent attention takes its portable kernel: %s", _hopper_faults[0])
        return False
    return True


def launch_portable(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    out: Tensor,
    scale: float,
    rows: tuple[int, int],
    first_token: int,
    max_query: int,
    window: int | None,
    sink_tokens: int,
    v_scale: float,
    chosen: Tensor | None,
    plan: LatentPlan | None,
) -> None:
    (first, end), (num_heads, rank), width, q_dim = rows, q.shape[1:], cache.shape[2], turned.shape[2]
    num_parts = 0 if plan is None else plan.num_parts
    reads = "chosen" if chosen is not None else "all" if window is None else "window"
    pairs, tile, warps, stages = tuned(num_heads, rank, q.dtype, reads, room=shared_bytes(q.device))
    heads, tokens = _dealt(num_heads, pairs, is_single=plan is not None or chosen is not None)
    num_tiles = -(-max_query // tokens) * -(-num_heads // heads)
    grid(_latent_kernel, num_tiles, end - first + num_parts)(
        q, turned, cache, out, q if chosen is None else chosen, step.block_tables, step.kv_lens, step.query_starts,
        out if plan is None else plan.partial, out if plan is None else plan.parts,
        scale * v_scale * LOG2_E, v_scale, q.stride(0), turned.stride(0), out.stride(0), cache.stride(0),
        0 if chosen is None else chosen.stride(0), step.block_tables.stride(0), first, first_token,
        window or 0, sink_tokens, end - first, num_parts,
        HEADS=heads, TOKENS=tokens, TILE=tile, STAGES=stages, SHARES_OUT=warps > 4, BLOCK_SIZE=step.block_size,
        TOP=0 if chosen is None else chosen.shape[1],
        HAS_WINDOW=window is not None,
        HAS_SINK_TOKENS=window is not None and sink_tokens > 0,
        COMPUTE=compute_dtype(q, is_fp8=cache.dtype == FP8),
        PART=rank + PART_ENDS,
        **deal_options(plan, end - first),
        **_attend_sizes(num_heads, q_dim - (width - rank), rank, width - rank),
        **chain_options(q, warps),
    )  # fmt: skip


@cached
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _attend_sizes(num_heads: int, nope_dim: int, rank: int, rope_dim: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "NOPE": nope_dim,
        "RANK": rank,
        "ROPE": rope_dim,
        "RANK_BLOCK": max(16, power_of_2(rank)),
        "ROPE_BLOCK": max(16, power_of_2(rope_dim)),
    }


def _dealt(num_heads: int, pairs: int, *, is_single: bool) -> tuple[int, int]:
    """(heads, tokens) of a program. is_single: of one token, and then of 16 heads at least, for tensor cores."""
    heads = min(pairs, power_of_2(num_heads))
    return (max(16, heads), 1) if is_single else (heads, pairs // heads)


def plan_latent(
    num_rows: int, num_heads: int, rank: int, *, dtype: torch.dtype, max_kv: int, device: torch.device
) -> LatentPlan:
    """How the contexts of rows with one token are cut. max_kv: an upper bound of what a query reads."""
    head_tiles = -(-num_heads // tuned(num_heads, rank, dtype, room=shared_bytes(device))[0])
    return new_plan(num_rows, num_heads, rank, head_tiles=head_tiles, max_kv=max_kv, device=device)


def tuned(
    num_heads: int, rank: int, dtype: torch.dtype, reads: Reads = "all", *, room: int = HOPPER_BYTES
) -> tuple[int, int, int, int]:
    """(pairs, tile, warps, stages) of a program: 64 pairs of 512 values are 128 registers a thread of 8 warps, and a
    tile of 64 vectors twice is what fits beside the queries (measured: docs/performance.md). Chosen
    tokens' places take stages too: with fewer than five no tile is read while another is worked on.
    room: bytes of shared memory; in less than Hopper's, what fits.
    """
    if dtype == torch.float32:
        return (16, 16, 4, 1) if rank > 128 else (MAX_PAIRS, 32, 4, 1)
    if room < HOPPER_BYTES:
        return 32, 32, 4, 2
    if num_heads <= 16:
        return 32, 32, 4, 5 if reads == "chosen" else 3
    return {"all": (MAX_PAIRS, 64, 8, 2), "window": (MAX_PAIRS, 32, 8, 4), "chosen": (MAX_PAIRS, 32, 8, 5)}[reads]
