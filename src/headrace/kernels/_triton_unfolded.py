"""Latent attention of prompts with keys and values unfolded by head: what `latent_attention` computes absorbed.

Cached vectors of the rows are gathered side by side in the compute dtype once, keys and values of some heads made of
them by two products, and attended to in FlashAttention-2's order (Dao 2023). Of DeepSeek-V3 that is 192 + 128
operations a pair of tokens and head where the absorbed form has 576 + 512. Lengths come from the host: every program
is an entry of a list that is made there, so that rows of any lengths share a launch and the longest go first. Contexts
may come in segments, one launch after another; what a tile of queries has seen is carried along.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import HOPPER_BYTES, grid, power_of_2, shared_bytes
from headrace.kernels._triton_decode import LOG2_E, compute_dtype
from headrace.kernels._unfolded_work import PIECE, Work, carried_width

GATHERED = 16
"""Vectors of a piece at a time."""


class Tuning(NamedTuple):
    """Of the attending kernel."""

    tokens: int
    """Queries of a program."""
    tile: int
    """Keys at a time."""
    warps: int
    stages: int


@triton.jit(do_not_specialize=["table_stride"])
def _gather_kernel(
    cache,
    out,
    tables,
    pieces,
    scale,
    block_stride,
    table_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs: pieces of PIECE vectors, zeros behind a row's last."""
    WIDTH: tl.constexpr = RANK + ROPE
    pieces += tl.program_id(0) * 4
    table = tables + tl.load(pieces).to(tl.int64) * table_stride
    first, count = tl.load(pieces + 1), tl.load(pieces + 2)
    target = out + tl.load(pieces + 3).to(tl.int64) * WIDTH
    dims, turns = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    for start in range(0, PIECE, STEP):
        at = start + tl.arange(0, STEP)
        known = at < count
        block = tl.load(table + (first + at) // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        source = cache + block * block_stride + (first + at) % BLOCK_SIZE * WIDTH
        mask = known[:, None] & (dims < RANK)[None, :]
        vectors = tl.load(source[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32) * scale
        place = target + at[:, None] * WIDTH + dims[None, :]
        tl.store(place, vectors.to(out.dtype.element_ty), mask=(dims < RANK)[None, :])
        if ROPE > 0:
            mask = known[:, None] & (turns < ROPE)[None, :]
            turned = tl.load(source[:, None] + RANK + turns[None, :], mask=mask, other=0.0).to(tl.float32) * scale
            place = target + at[:, None] * WIDTH + RANK + turns[None, :]
            tl.store(place, turned.to(out.dtype.element_ty), mask=(turns < ROPE)[None, :])


def launch_gather(
    cache: Tensor, block_tables: Tensor, work: Work, *, out: Tensor, rank: int, scale: float = 1.0
) -> None:
    """Cached vectors of the rows, side by side.

    Args:
        cache: [num_blocks, block_size, rank + rope_dim].
        block_tables: [rows, max_blocks] int32.
        out: [work.num_kv, rank + rope_dim] contiguous, to write to.
        scale: entries are times this.
    """
    width = cache.shape[2]
    assert out.is_contiguous() and out.shape == (work.num_kv, width) and cache.stride()[1:] == (width, 1)
    grid(_gather_kernel, len(work.pieces))(
        cache, out, block_tables, work.pieces, scale, cache.stride(0), block_tables.stride(0),
        BLOCK_SIZE=cache.shape[1], **_gather_sizes(rank, width - rank), num_warps=8,
    )  # fmt: skip


def _gather_sizes(rank: int, rope_dim: int) -> dict[str, int]:
    return {
        "RANK": rank,
        "ROPE": rope_dim,
        "RANK_BLOCK": power_of_2(rank),
        "ROPE_BLOCK": power_of_2(rope_dim),
        "PIECE": PIECE,
        "STEP": GATHERED,
    }


@triton.jit
def _tile_of(source, at, head, stride, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """[TILE, BLOCK] features of a head of vectors from `at` on."""
    dims = tl.arange(0, BLOCK)
    pointers = source + (at + tl.arange(0, TILE))[:, None] * stride + (head * DIM + dims)[None, :]
    if DIM == BLOCK:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def _attend_tile(
    start,
    place,
    head,
    query,
    query_turned,
    positions,
    highest,
    total,
    acc,
    keys,
    turned,
    values,
    k_stride,
    turned_stride,
    v_stride,
    scale,
    length,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUES: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys and values. length: keys that any query sees. A query that sees nothing of it has seen some
    before, or sees nothing ever."""
    key = _tile_of(keys, place + start, head, k_stride, NOPE, NOPE_BLOCK, TILE)
    scores = tl.dot(query, tl.trans(key.to(COMPUTE)), input_precision="ieee")
    if ROPE > 0:
        key = _tile_of(turned, place + start, 0, turned_stride, ROPE, ROPE_BLOCK, TILE)
        scores = tl.dot(query_turned, tl.trans(key.to(COMPUTE)), scores, input_precision="ieee")
    if MASKED:
        at = start + tl.arange(0, TILE)
        scores = tl.where((at[None, :] <= positions[:, None]) & (at < length)[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    fade = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    total = total * fade + tl.sum(weights, 1)
    value = _tile_of(values, place + start, head, v_stride, VALUES, VALUE_BLOCK, TILE)
    acc = tl.dot(weights.to(COMPUTE), value.to(COMPUTE), acc * fade[:, None], input_precision="ieee")
    return new_highest, total, acc


@triton.jit
def _carried_to(carry, flags, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    """What a tile's queries saw in the segments before: TOKENS * FEATURES weighted values, maxima, sums."""
    index, features = tl.arange(0, TOKENS), tl.arange(0, FEATURES)
    resumes = index >= flags % 2 * TOKENS  # all or none
    ends = carry + TOKENS * FEATURES + index
    highest = tl.load(ends, mask=resumes, other=float("-inf"))
    total = tl.load(ends + TOKENS, mask=resumes, other=0.0)
    acc = tl.load(carry + index[:, None] * FEATURES + features[None, :], mask=resumes[:, None], other=0.0)
    return highest, total, acc


@triton.jit
def _carry_on(carry, highest, total, acc, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    index, features = tl.arange(0, TOKENS), tl.arange(0, FEATURES)
    tl.store(carry + TOKENS * FEATURES + index, highest)
    tl.store(carry + TOKENS * (FEATURES + 1) + index, total)
    tl.store(carry + index[:, None] * FEATURES + features[None, :], acc)


@triton.jit
def _unfolded_kernel(
    q,
    keys,
    turned,
    values,
    out,
    carry,
    tiles,
    scale,
    q_stride,
    k_stride,
    turned_stride,
    v_stride,
    out_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUES: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_CARRY: tl.constexpr,
):
    """Programs: (tiles of TOKENS queries of a row, heads). Tiles of a head are neighbours: they read the same keys."""
    tile, head = tiles + tl.program_id(0) * 7, tl.program_id(1)
    first_query, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    place, first_position, length = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    index = tl.arange(0, TOKENS)
    mask = index < count
    positions = first_position + tl.minimum(index, count - 1)
    dims, turns, features = tl.arange(0, NOPE_BLOCK), tl.arange(0, ROPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    at_query = q + (first_query + index)[:, None] * q_stride + head * (NOPE + ROPE)
    query = tl.load(at_query + dims[None, :], mask=mask[:, None] & (dims < NOPE)[None, :], other=0.0).to(COMPUTE)
    at_turned, turned_mask = at_query + NOPE + turns[None, :], mask[:, None] & (turns < ROPE)[None, :]
    query_turned = tl.load(at_turned, mask=turned_mask, other=0.0).to(COMPUTE) if ROPE > 0 else query
    middle = tl.maximum(tl.minimum(first_position + 1, length), 0) // TILE * TILE
    if HAS_CARRY:
        slot = tl.load(tile + 5) * tl.num_programs(1) + head
        carry += slot.to(tl.int64) * (TOKENS * (VALUE_BLOCK + 2))
        highest, total, acc = _carried_to(carry, tl.load(tile + 6), TOKENS, VALUE_BLOCK)
    else:
        highest = tl.full((TOKENS,), float("-inf"), tl.float32)
        total = tl.zeros((TOKENS,), tl.float32)
        acc = tl.zeros((TOKENS, VALUE_BLOCK), tl.float32)
    for start in tl.range(0, middle, TILE, num_stages=STAGES):
        highest, total, acc = _attend_tile(
            start, place, head, query, query_turned, positions, highest, total, acc,
            keys, turned, values, k_stride, turned_stride, v_stride, scale, length,
            NOPE, ROPE, VALUES, NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, TILE, COMPUTE, False,
        )  # fmt: skip
    for start in tl.range(middle, length, TILE, num_stages=STAGES):
        highest, total, acc = _attend_tile(
            start, place, head, query, query_turned, positions, highest, total, acc,
            keys, turned, values, k_stride, turned_stride, v_stride, scale, length,
            NOPE, ROPE, VALUES, NOPE_BLOCK, ROPE_BLOCK, VALUE_BLOCK, TILE, COMPUTE, True,
        )  # fmt: skip
    if HAS_CARRY:
        if tl.load(tile + 6) < 2:
            _carry_on(carry, highest, total, acc, TOKENS, VALUE_BLOCK)
            return
    target = out + (first_query + index)[:, None] * out_stride + head * VALUES + features[None, :]
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=mask[:, None] & (features < VALUES)[None, :])


def launch_unfolded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    turned: Tensor,
    work: Work,
    *,
    out: Tensor,
    scale: float,
    carry: Tensor | None = None,
    tuning: Tuning | None = None,
) -> None:
    """Attend the rows of the work.

    Args:
        q: [tokens, heads, nope_dim + rope_dim], heads contiguous, rope applied.
        keys: [work.num_kv, heads, nope_dim], what rope doesn't turn of them. values: [work.num_kv, heads, v_dim].
        turned: [work.num_kv, rope_dim], what it does, for all heads.
        out: [tokens, heads, v_dim], heads contiguous, to write to.
        scale: of the scores, more than 0.
        carry: `new_carry`, where the works of several segments come one after another.
        tuning: the work's tiles are of so many tokens.
    """
    num_heads, nope_dim, rope_dim, v_dim = q.shape[1], keys.shape[2], turned.shape[1], values.shape[2]
    assert q.stride()[1:] == (nope_dim + rope_dim, 1) and out.stride()[1:] == (v_dim, 1)
    assert keys.is_contiguous() and values.is_contiguous() and turned.stride(1) == 1
    assert max(keys.numel(), values.numel(), work.num_kv * turned.stride(0)) < 1 << 31, "places are 32 bits"
    tuning = tuning or tuned(q.dtype, room=shared_bytes(q.device))
    assert PIECE % tuning.tile == 0, "tiles of keys stay within a row's zeros"
    grid(_unfolded_kernel, len(work.tiles), num_heads)(
        q, keys, turned, values, out, out if carry is None else carry, work.tiles, scale * LOG2_E,
        q.stride(0), keys.stride(0), turned.stride(0), values.stride(0), out.stride(0),
        TOKENS=tuning.tokens,
        TILE=tuning.tile,
        STAGES=tuning.stages,
        COMPUTE=compute_dtype(q, is_fp8=False),
        HAS_CARRY=carry is not None,
        num_warps=tuning.warps,
        **_unfolded_sizes(nope_dim, rope_dim, v_dim),
    )  # fmt: skip


def new_carry(like: Tensor, work: Work, *, num_heads: int, v_dim: int, tuning: Tuning | None = None) -> Tensor:
    """Where tiles of queries keep what they have seen between the segments of a work. like: of the device."""
    tokens = (tuning or tuned(like.dtype, room=shared_bytes(like.device))).tokens
    return like.new_empty(work.num_carried * num_heads * tokens * carried_width(v_dim), dtype=torch.float32)


def _unfolded_sizes(nope_dim: int, rope_dim: int, v_dim: int) -> dict[str, int]:
    return {
        "NOPE": nope_dim,
        "ROPE": rope_dim,
        "VALUES": v_dim,
        "NOPE_BLOCK": max(16, power_of_2(nope_dim)),
        "ROPE_BLOCK": max(16, power_of_2(rope_dim)),
        "VALUE_BLOCK": max(16, power_of_2(v_dim)),
    }


def tuned(dtype: torch.dtype, *, room: int = HOPPER_BYTES) -> Tuning:
    """Measured on an H200 with heads of 128 + 64 features and values of 128 (docs/performance.md); in float32 what
    holds them without spilled registers, and in less shared memory than Hopper's `room` what fits."""
    if dtype == torch.float32:
        return Tuning(16, 16, 8, 1)
    return Tuning(128, 64, 8, 3) if room >= HOPPER_BYTES else Tuning(64, 64, 4, 2)
