"""The delta rule in Triton: a prompt's chunks all at once, then a chain over them; single tokens token by token.

What a chunk's tokens write solves a triangular system (Yang et al. 2025) that does not depend on the state: a first
pass works out its inverse and the scores of queries for the chunk's own keys, for all chunks at the same time. The
chain then takes a few products a chunk, with a tile of one head's state in registers.

In a bfloat16 model q, k and v are exact factors. What is in float32 becomes the sum of two bfloat16 numbers, which
keeps 16 of its bits: products run at the tensor cores' full rate, and the states lose nothing beside the rounding of
q, k and v themselves. States are summed in float32.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels.port import StateRows

STEP_VALUES = 32
"""Value features of a state tile where rows have one token each."""
WORKSPACE_BYTES = 256 << 20
"""Bounds what a pass over chunks leaves to the chain; a longer step goes by segments, with the states in the pool."""
NORM_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
"""Passes over chunks take powers of 2: those of e are several instructions each."""
MILD = tl.constexpr(-110.0)
"""Products of two factors, each decayed from or to the middle of so many halvings, stay well inside float32."""


class Tiling(NamedTuple):
    """How a prompt's tokens are cut."""

    part: int
    """Half a chunk: tokens of a block of pairs."""
    features: int
    """Key features that a pass over chunks takes at a time."""
    values: int
    """Value features of a state tile; a head of more has several."""
    part_warps: int
    chain_warps: int
    stages: int
    """Chunks whose operands are on their way to the chain at the same time."""
    terms: int
    """bfloat16 numbers that one in float32 is split into; 0 multiplies in float32."""
    out_terms: int
    """The same where a product goes to the output only."""
    precision: str
    """Of products in float32."""


BFLOAT16 = Tiling(16, 32, 64, part_warps=1, chain_warps=4, stages=3, terms=2, out_terms=2, precision="ieee")
BFLOAT16_BY_FEATURE = BFLOAT16._replace(features=16)
FLOAT32 = Tiling(16, 16, 32, part_warps=2, chain_warps=8, stages=1, terms=0, out_terms=0, precision="ieee")


def tiling(x: Tensor, *, by_feature: bool) -> Tiling:
    """For a model in the type of x."""
    if x.dtype == torch.bfloat16:
        return BFLOAT16_BY_FEATURE if by_feature else BFLOAT16
    return FLOAT32


# ---- all chunks at once ----------------------------------------------------------------------


@triton.jit
def _chunk_of(index, query_starts, num_rows, num_rounds, CHUNK: tl.constexpr):
    """-> (its row's end, its first token, behind the end if there is no such chunk)

    A row's first chunk is at start // CHUNK + row, so a chunk's row is the last one that begins at or before it.
    """
    low, high = 0, num_rows
    for _ in range(num_rounds):
        middle = (low + high) // 2
        is_before = tl.load(query_starts + middle) // CHUNK + middle <= index
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    start, end = tl.load(query_starts + low).to(tl.int64), tl.load(query_starts + low + 1)
    return end, start + (index - start // CHUNK - low) * CHUNK


@triton.jit
def _high(x):
    """The upper 16 bits of float32 numbers, which bfloat16 holds. Less work than rounding, for one bit of 17."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _store_split(place, value, distance, TERMS: tl.constexpr):
    """value: [a, b] float32, as TERMS bfloat16 numbers at `place` and `distance` behind; as it is for 0."""
    if TERMS == 0:
        tl.store(place, value)
    elif TERMS == 1:
        tl.store(place, value.to(tl.bfloat16))
    else:
        high = _high(value)
        tl.store(place, high.to(tl.bfloat16))
        tl.store(place + distance, (value - high).to(tl.bfloat16))


@triton.jit
def _store_blocks(work, first, across, second, at, PART: tl.constexpr, TERMS: tl.constexpr):
    """A lower triangular matrix [2 * PART, 2 * PART] by its blocks."""
    place, size = work + at[:, None] * (2 * PART) + at[None, :], 4 * PART * PART
    _store_split(place, first, size, TERMS)
    _store_split(place + PART, tl.zeros_like(first), size, TERMS)
    _store_split(place + 2 * PART * PART, across, size, TERMS)
    _store_split(place + 2 * PART * PART + PART, second, size, TERMS)


@triton.jit
def _cross(a, b, total, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """total + a @ b, all float32"""
    if TERMS == 0:
        return tl.dot(a, b, total, input_precision=PRECISION)
    high_a, high_b = _high(a), _high(b)
    low_a, low_b = (a - high_a).to(tl.bfloat16).to(COMPUTE), (b - high_b).to(tl.bfloat16).to(COMPUTE)
    high_a, high_b = high_a.to(COMPUTE), high_b.to(COMPUTE)
    return tl.dot(high_a, high_b, tl.dot(high_a, low_b, tl.dot(low_a, high_b, total)))


@triton.jit
def _inverse(
    pairs, at, LEVELS: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(1 + pairs)^-1 of strictly triangular pairs [2^LEVELS, 2^LEVELS]: blocks of two, then each twice as large.

    Powers of pairs would be as many products, but keys that are alike make them large, and digits are lost.
    """
    row, column = at[:, None], at[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -pairs, 0.0))
    for level in tl.static_range(1, LEVELS):
        is_between = (row >> level != column >> level) & (row >> (level + 1) == column >> (level + 1))
        part = tl.where(is_between, -pairs, 0.0)
        part = _cross(inverse, part, tl.zeros_like(pairs), TERMS, COMPUTE, PRECISION)
        inverse = _cross(part, inverse, inverse, TERMS, COMPUTE, PRECISION)
    return inverse


@triton.jit
def _store_matrices(
    solved, scores, place, pairs0, pairs10, pairs1, scores0, scores10, scores1, share0, share1, at,
    PART: tl.constexpr, LEVELS: tl.constexpr, TERMS: tl.constexpr, OUT_TERMS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of blocks: the inverse of 1 + pairs, its columns times the betas, and the scores, of what each token sees."""
    is_seen, is_before = at[:, None] >= at[None, :], at[:, None] > at[None, :]
    inverse0 = _inverse(tl.where(is_before, pairs0, 0.0), at, LEVELS, TERMS, COMPUTE, PRECISION)
    inverse1 = _inverse(tl.where(is_before, pairs1, 0.0), at, LEVELS, TERMS, COMPUTE, PRECISION)
    none = tl.zeros_like(pairs10)
    inverse10 = _cross(inverse1, -pairs10, none, TERMS, COMPUTE, PRECISION)
    inverse10 = _cross(inverse10, inverse0, none, TERMS, COMPUTE, PRECISION)
    solved += place * (4 * PART * PART * (TERMS if TERMS > 1 else 1))
    share0, share1 = share0[None, :], share1[None, :]
    _store_blocks(solved, inverse0 * share0, inverse10 * share0, inverse1 * share1, at, PART, TERMS)
    scores += place * (4 * PART * PART * (OUT_TERMS if OUT_TERMS > 1 else 1))
    scores0, scores1 = tl.where(is_seen, scores0, 0.0), tl.where(is_seen, scores1, 0.0)
    _store_blocks(scores, scores0, scores10, scores1, at, PART, OUT_TERMS)


@triton.jit
def _load_pair(x, place, place1, mask, mask1):
    return tl.load(x + place, mask=mask, other=0.0), tl.load(x + place1, mask=mask1, other=0.0)


@triton.jit
def _sums(decay0, decay1):
    """Running sums over tokens and sums of both, as exponents of 2."""
    decay0, decay1 = decay0 * LOG2_E, decay1 * LOG2_E
    return tl.cumsum(decay0, 0), tl.sum(decay0, 0), tl.cumsum(decay1, 0), tl.sum(decay1, 0)


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def _by_token(factors, unit0, unit1, asks0, asks1, grown0, grown1, left0, left1, at, PART: tl.constexpr):
    """Store what the chain multiplies with: products with keys that read, with queries, and keys that write."""
    tl.store(factors + at, unit0 * grown0)
    tl.store(factors + PART + at, unit1 * grown1)
    tl.store(factors + 2 * PART + at, asks0 * grown0)
    tl.store(factors + 3 * PART + at, asks1 * grown1)
    tl.store(factors + 4 * PART + at, unit0 * left0)
    tl.store(factors + 5 * PART + at, unit1 * left1)


@triton.jit
def _norm(pairs, at):
    """What norms the keys, of their own products."""
    return tl.rsqrt(tl.sum(tl.where(at[:, None] == at[None, :], pairs, 0.0), 1) + NORM_EPS)


@triton.jit
def _chunk_kernel(
    q, k, decay, beta, query_starts, solved, scores, factors,
    first, num_rows, num_rounds, heads, k_dim, scale, q_stride, k_stride,
    GROUP: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    TERMS: tl.constexpr, OUT_TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: (heads, chunks). What the chain needs of a chunk, for one decay a head.

    `factors`: [chunks, heads, 4, 2 * PART], as `_by_token` stores them; last what is left of the state.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    end, at_chunk = _chunk_of(first + index, query_starts, num_rows, num_rounds, 2 * PART)
    at, place = tl.arange(0, PART), index * heads + head
    token0, token1 = at_chunk + at, at_chunk + PART + at
    if at_chunk >= end:
        return
    is_token0, is_token1 = token0 < end, token1 < end
    none, zero = tl.zeros((PART, PART), tl.float32), tl.zeros((PART,), tl.float32)
    pairs0, pairs10, pairs1, scores0, scores10, scores1 = none, none, none, none, none, none
    asks0, asks1 = zero, zero
    for begin in range(0, KEYS, SLICE):
        key = (begin + tl.arange(0, SLICE))[None, :]
        mask0, mask1 = is_token0[:, None] & (key < k_dim), is_token1[:, None] & (key < k_dim)
        feature = (head // GROUP) * k_dim + key
        k0, k1 = _load_pair(k, token0[:, None] * k_stride + feature, token1[:, None] * k_stride + feature, mask0, mask1)
        q0, q1 = _load_pair(q, token0[:, None] * q_stride + feature, token1[:, None] * q_stride + feature, mask0, mask1)
        asks0, asks1 = asks0 + _squares(q0), asks1 + _squares(q1)
        k0, k1, q0, q1 = k0.to(COMPUTE), k1.to(COMPUTE), q0.to(COMPUTE), q1.to(COMPUTE)
        pairs0 = tl.dot(k0, tl.trans(k0), pairs0, input_precision=PRECISION)
        pairs10 = tl.dot(k1, tl.trans(k0), pairs10, input_precision=PRECISION)
        pairs1 = tl.dot(k1, tl.trans(k1), pairs1, input_precision=PRECISION)
        scores0 = tl.dot(q0, tl.trans(k0), scores0, input_precision=PRECISION)
        scores10 = tl.dot(q1, tl.trans(k0), scores10, input_precision=PRECISION)
        scores1 = tl.dot(q1, tl.trans(k1), scores1, input_precision=PRECISION)
    unit0, unit1 = _norm(pairs0, at), _norm(pairs1, at)
    asks0, asks1 = tl.rsqrt(asks0 + NORM_EPS) * scale, tl.rsqrt(asks1 + NORM_EPS) * scale
    # Tokens behind the row's end decay nothing and write nothing.
    share0, share1 = _load_pair(beta, token0 * heads + head, token1 * heads + head, is_token0, is_token1)
    decay0, decay1 = _load_pair(decay, token0 * heads + head, token1 * heads + head, is_token0, is_token1)
    total0, sum0, total1, sum1 = _sums(decay0, decay1)
    between0 = tl.exp2(tl.minimum(total0[:, None] - total0[None, :], 0.0)) * unit0[None, :]
    between1 = tl.exp2(tl.minimum(total1[:, None] - total1[None, :], 0.0)) * unit1[None, :]
    grown0, grown1, left0, left1 = tl.exp2(total0), tl.exp2(total1), tl.exp2(sum0 - total0), tl.exp2(sum1 - total1)
    across, factors = grown1[:, None] * (unit0 * left0)[None, :], factors + place * (8 * PART)
    kept, written = tl.exp2(sum0), tl.exp2(sum1)
    _by_token(factors, unit0, unit1, asks0, asks1, grown0, grown1 * kept, left0 * written, left1, at, PART)
    tl.store(factors + 6 * PART, kept * written)
    unit0, unit1 = unit0 * share0, unit1 * share1
    _store_matrices(
        solved, scores, place, pairs0 * unit0[:, None] * between0, pairs10 * unit1[:, None] * across,
        pairs1 * unit1[:, None] * between1, scores0 * asks0[:, None] * between0, scores10 * asks1[:, None] * across,
        scores1 * asks1[:, None] * between1, share0, share1, at, PART, LEVELS, TERMS, OUT_TERMS, COMPUTE, PRECISION,
    )  # fmt: skip


@triton.jit
def _strong(pairs, scores, keys, asks, total, at, PART: tl.constexpr):
    """A block's products of keys, and of queries and keys, each feature decayed between them, one column at a time.

    keys, asks, total: [PART, features] float32; `total` the decays' running sums. Above the diagonal comes anything.
    """
    for token in range(PART):
        is_token, is_column = (at == token)[:, None], (at == token)[None, :]
        one, since = tl.sum(tl.where(is_token, keys, 0.0), 0), tl.sum(tl.where(is_token, total, 0.0), 0)
        held = tl.exp2(tl.minimum(total - since[None, :], 0.0)) * one[None, :]
        pairs += tl.where(is_column, tl.sum(keys * held, 1)[:, None], 0.0)
        scores += tl.where(is_column, tl.sum(asks * held, 1)[:, None], 0.0)
    return pairs, scores


@triton.jit
def _decayed_products(
    pairs0, pairs10, pairs1, scores0, scores10, scores1, k0, k1, q0, q1, total0, total1, sum0, sum1, grown0, grown1, at,
    PART: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a chunk's products of keys, and of queries and keys, each feature decayed between them.

    Decays between two tokens are products of two factors, from and to the middle of the later one's block; where the
    larger one would overflow, each is worked out for itself. Also what is left of each token at its block's end.
    """
    if tl.min(tl.minimum(sum0, sum1), 0) > MILD:
        half0, half1 = (0.5 * sum0)[None, :], (0.5 * sum1)[None, :]
        left0, left1, last0, last1 = tl.exp2(half0 - total0), tl.exp2(half1 - total1), tl.exp2(half0), tl.exp2(half1)
        other0, other1 = tl.trans(k0 * left0), tl.trans(k1 * left1)
        left0, left1, from0, from1 = left0 * last0, left1 * last1, grown0 * tl.exp2(-half0), grown1 * tl.exp2(-half1)
        other10 = tl.trans(k0 * (left0 * last1))
        pairs0 = _cross(k0 * from0, other0, pairs0, TERMS, COMPUTE, PRECISION)
        scores0 = _cross(q0 * from0, other0, scores0, TERMS, COMPUTE, PRECISION)
        k1, q1 = k1 * from1, q1 * from1
        pairs1 = _cross(k1, other1, pairs1, TERMS, COMPUTE, PRECISION)
        scores1 = _cross(q1, other1, scores1, TERMS, COMPUTE, PRECISION)
        pairs10 = _cross(k1, other10, pairs10, TERMS, COMPUTE, PRECISION)
        scores10 = _cross(q1, other10, scores10, TERMS, COMPUTE, PRECISION)
    else:
        left0, left1 = (
            tl.exp2(tl.minimum(sum0[None, :] - total0, 0.0)),
            tl.exp2(tl.minimum(sum1[None, :] - total1, 0.0)),
        )
        pairs0, scores0 = _strong(pairs0, scores0, k0, q0, total0, at, PART)
        pairs1, scores1 = _strong(pairs1, scores1, k1, q1, total1, at, PART)
        other10 = tl.trans(k0 * left0)
        pairs10 = _cross(k1 * grown1, other10, pairs10, TERMS, COMPUTE, PRECISION)
        scores10 = _cross(q1 * grown1, other10, scores10, TERMS, COMPUTE, PRECISION)
    return pairs0, pairs10, pairs1, scores0, scores10, scores1, left0, left1


@triton.jit
def _feature_chunk_kernel(
    q, k, decay, beta, query_starts, solved, scores, factors, read, keep, ask, faded,
    first, num_rows, num_rounds, heads, k_dim, scale, q_stride, k_stride,
    GROUP: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
    TERMS: tl.constexpr, OUT_TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_chunk_kernel`, for a decay by key feature, some features at a time. `read`, `keep`, `ask`: keys decayed from
    the chunk's begin and to its end, queries decayed from its begin. `faded`: what is left of the state.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    end, at_chunk = _chunk_of(first + index, query_starts, num_rows, num_rounds, 2 * PART)
    at, place, size = tl.arange(0, PART), index * heads + head, 2 * PART * KEYS
    token0, token1 = at_chunk + at, at_chunk + PART + at
    if at_chunk >= end:
        return
    is_token0, is_token1, of0, of1 = token0 < end, token1 < end, token0 * heads + head, token1 * heads + head
    none, zero = tl.zeros((PART, PART), tl.float32), tl.zeros((PART,), tl.float32)
    pairs0, pairs10, pairs1, scores0, scores10, scores1, asks0, asks1 = none, none, none, none, none, none, zero, zero
    for begin in range(0, KEYS, SLICE):
        key = (begin + tl.arange(0, SLICE))[None, :]
        mask0, mask1 = is_token0[:, None] & (key < k_dim), is_token1[:, None] & (key < k_dim)
        feature = (head // GROUP) * k_dim + key
        k0, k1 = _load_pair(k, token0[:, None] * k_stride + feature, token1[:, None] * k_stride + feature, mask0, mask1)
        q0, q1 = _load_pair(q, token0[:, None] * q_stride + feature, token1[:, None] * q_stride + feature, mask0, mask1)
        decay0, decay1 = _load_pair(decay, of0[:, None] * k_dim + key, of1[:, None] * k_dim + key, mask0, mask1)
        k0, k1, q0, q1 = k0.to(tl.float32), k1.to(tl.float32), q0.to(tl.float32), q1.to(tl.float32)
        decay0, decay1 = decay0 * LOG2_E, decay1 * LOG2_E
        asks0, asks1 = asks0 + _squares(q0), asks1 + _squares(q1)
        total0, total1, sum0, sum1 = tl.cumsum(decay0, 0), tl.cumsum(decay1, 0), tl.sum(decay0, 0), tl.sum(decay1, 0)
        grown0, grown1, kept, written = tl.exp2(total0), tl.exp2(total1), tl.exp2(sum0), tl.exp2(sum1)
        pairs0, pairs10, pairs1, scores0, scores10, scores1, left0, left1 = _decayed_products(
            pairs0, pairs10, pairs1, scores0, scores10, scores1, k0, k1, q0, q1, total0, total1, sum0, sum1,
            grown0, grown1, at, PART, TERMS, COMPUTE, PRECISION,
        )  # fmt: skip
        of_keys = place * (size * (TERMS if TERMS > 1 else 1)) + at[:, None] * KEYS + key
        of_asks = place * (size * (OUT_TERMS if OUT_TERMS > 1 else 1)) + at[:, None] * KEYS + key
        _store_split(read + of_keys, k0 * grown0, size, TERMS)
        _store_split(keep + of_keys, k0 * (left0 * written[None, :]), size, TERMS)
        _store_split(keep + of_keys + PART * KEYS, k1 * left1, size, TERMS)
        _store_split(ask + of_asks, q0 * grown0, size, OUT_TERMS)
        grown1 *= kept[None, :]
        _store_split(read + of_keys + PART * KEYS, k1 * grown1, size, TERMS)
        _store_split(ask + of_asks + PART * KEYS, q1 * grown1, size, OUT_TERMS)
        tl.store(faded + place * KEYS + begin + tl.arange(0, SLICE), kept * written)
    unit0, unit1 = _norm(pairs0, at), _norm(pairs1, at)
    asks0, asks1 = tl.rsqrt(asks0 + NORM_EPS) * scale, tl.rsqrt(asks1 + NORM_EPS) * scale
    _by_token(factors + place * (8 * PART), unit0, unit1, asks0, asks1, 1.0, 1.0, 1.0, 1.0, at, PART)
    share0, share1 = _load_pair(beta, of0, of1, is_token0, is_token1)
    row0, row1, column0, column1 = (unit0 * share0)[:, None], (unit1 * share1)[:, None], unit0[None, :], unit1[None, :]
    asks0, asks1 = asks0[:, None], asks1[:, None]
    _store_matrices(
        solved, scores, place, pairs0 * row0 * column0, pairs10 * row1 * column0, pairs1 * row1 * column1,
        scores0 * asks0 * column0, scores10 * asks1 * column0, scores1 * asks1 * column1,
        share0, share1, at, PART, LEVELS, TERMS, OUT_TERMS, COMPUTE, PRECISION,
    )  # fmt: skip


# ---- the chain over chunks -------------------------------------------------------------------


@triton.jit
def _load_split(place, distance, TERMS: tl.constexpr, COMPUTE: tl.constexpr):
    """What `_store_split` stored: the first number, and the second where there are two."""
    high = tl.load(place).to(COMPUTE)
    low = high
    if TERMS > 1:
        low = tl.load(place + distance).to(COMPUTE)
    return high, low


@triton.jit
def _product(
    a, b, low_b, total,
    TERMS: tl.constexpr, IS_EXACT: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total + a @ (b + low_b)^T; `low_b` counts where b is not exact. a, total: float32."""
    if TERMS == 0:
        return tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if TERMS == 1:
        return tl.dot(a.to(tl.bfloat16).to(COMPUTE), tl.trans(b), total)
    high = _high(a)
    total = tl.dot((a - high).to(tl.bfloat16).to(COMPUTE), tl.trans(b), total)
    if not IS_EXACT:
        total = tl.dot(high.to(COMPUTE), tl.trans(low_b), total)
    return tl.dot(high.to(COMPUTE), tl.trans(b), total)


@triton.jit
def _chain_kernel(
    q, k, v, solved, scores, factors, read, keep, ask, faded, state, out, slots, query_starts,
    first, count, heads, k_dim, v_dim, q_stride, k_stride, v_stride, state_stride,
    GROUP: tl.constexpr, BY_FEATURE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    TERMS: tl.constexpr, OUT_TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of values, heads, rows). A row's chunks among the `count` from `first` on.

    States and all that is summed lie across, by value first: so they go from one product to the next in registers.
    """
    row, head = tl.program_id(2), tl.program_id(1)
    start, end = tl.load(query_starts + row).to(tl.int64), tl.load(query_starts + row + 1)
    base = (start // CHUNK).to(tl.int32) + row - first
    begin, stop = tl.maximum(-base, 0), tl.minimum(tl.cdiv((end - start).to(tl.int32), CHUNK), count - base)
    if begin >= stop:
        return
    value, key, inside = tl.program_id(0) * VALUES + tl.arange(0, VALUES), tl.arange(0, KEYS), tl.arange(0, CHUNK)
    is_value, is_key, feature = (value < v_dim)[:, None], (key < k_dim)[None, :], (head // GROUP) * k_dim + key[None, :]
    held = head * k_dim * v_dim + key[None, :] * v_dim + value[:, None]
    live = tl.load(state + tl.load(slots + row) * state_stride + held, mask=is_value & is_key, other=0.0).to(tl.float32)
    square, tile = inside[:, None] * CHUNK + inside[None, :], inside[:, None] * KEYS + key[None, :]
    for chunk in tl.range(begin, stop, num_stages=STAGES):
        place, token = (base + chunk) * heads + head, start + chunk * CHUNK + inside
        of_v, is_token = head * v_dim + value[:, None], token < end
        new = tl.load(v + token[None, :] * v_stride + of_v, mask=is_token[None, :] & is_value, other=0.0).to(tl.float32)
        of_pairs = place * (CHUNK * CHUNK * (TERMS if TERMS > 1 else 1)) + square
        of_scores = place * (CHUNK * CHUNK * (OUT_TERMS if OUT_TERMS > 1 else 1)) + square
        solution, low_solution = _load_split(solved + of_pairs, CHUNK * CHUNK, TERMS, COMPUTE)
        score, low_score = _load_split(scores + of_scores, CHUNK * CHUNK, OUT_TERMS, COMPUTE)
        by_token = factors + place * (4 * CHUNK) + inside
        if BY_FEATURE:
            of_keys = place * (CHUNK * KEYS * (TERMS if TERMS > 1 else 1)) + tile
            of_asks = place * (CHUNK * KEYS * (OUT_TERMS if OUT_TERMS > 1 else 1)) + tile
            reads, low_reads = _load_split(read + of_keys, CHUNK * KEYS, TERMS, COMPUTE)
            keeps, low_keeps = _load_split(keep + of_keys, CHUNK * KEYS, TERMS, COMPUTE)
            asks, low_asks = _load_split(ask + of_asks, CHUNK * KEYS, OUT_TERMS, COMPUTE)
            left = tl.load(faded + place * KEYS + key)[None, :]
        else:
            mask = is_token[:, None] & is_key
            reads = tl.load(k + token[:, None] * k_stride + feature, mask=mask, other=0.0).to(COMPUTE)
            asks = tl.load(q + token[:, None] * q_stride + feature, mask=mask, other=0.0).to(COMPUTE)
            low_reads, keeps, low_keeps, low_asks = reads, reads, reads, asks
            left = tl.load(factors + place * (4 * CHUNK) + 3 * CHUNK)
        none = tl.zeros((VALUES, CHUNK), tl.float32)
        found = _product(live, reads, low_reads, none, TERMS, not BY_FEATURE, COMPUTE, PRECISION)
        mixed = _product(live, asks, low_asks, none, OUT_TERMS, not BY_FEATURE, COMPUTE, PRECISION)
        new -= found * tl.load(by_token)[None, :]
        written = _product(new, solution, low_solution, none, TERMS, False, COMPUTE, PRECISION)
        mixed *= tl.load(by_token + CHUNK)[None, :]
        mixed = _product(written, score, low_score, mixed, OUT_TERMS, False, COMPUTE, PRECISION)
        of_out = (token[None, :] * heads + head) * v_dim + value[:, None]
        tl.store(out + of_out, mixed, mask=is_token[None, :] & is_value)
        written *= tl.load(by_token + 2 * CHUNK)[None, :]
        live = _product(
            written, tl.trans(keeps), tl.trans(low_keeps), live * left, TERMS, not BY_FEATURE, COMPUTE, PRECISION
        )
    # Addresses are worked out again: kept over the loop they would take registers from it.
    held += tl.load(slots + row) * state_stride
    tl.store(state + held, live.to(state.dtype.element_ty), mask=is_value & is_key)


# ---- single tokens ---------------------------------------------------------------------------


@triton.jit
def _delta_step_kernel(
    q, k, v, decay, beta, state, out, slots, query_starts,
    first_row, heads, k_dim, v_dim, scale,
    q_stride, k_stride, v_stride, state_stride,
    GROUP: tl.constexpr, BY_FEATURE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of values, heads, rows). Token by token."""
    row = tl.program_id(2) + first_row
    head = tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < k_dim, value < v_dim
    slot = tl.load(slots + row)
    held = state + slot * state_stride + head * k_dim * v_dim + key[:, None] * v_dim + value[None, :]
    mask = is_key[:, None] & is_value[None, :]
    live = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    start = tl.load(query_starts + row).to(tl.int64)
    end = tl.load(query_starts + row + 1).to(tl.int64)
    for token in range(start, end):
        place = (head // GROUP) * k_dim + key
        one_q = tl.load(q + token * q_stride + place, mask=is_key, other=0.0).to(tl.float32)
        one_k = tl.load(k + token * k_stride + place, mask=is_key, other=0.0).to(tl.float32)
        one_q = one_q * (tl.rsqrt(tl.sum(one_q * one_q, 0) + NORM_EPS) * scale)
        one_k = one_k * tl.rsqrt(tl.sum(one_k * one_k, 0) + NORM_EPS)
        one_v = tl.load(v + token * v_stride + head * v_dim + value, mask=is_value, other=0.0).to(tl.float32)
        if BY_FEATURE:
            kept = tl.exp(tl.load(decay + (token * heads + head) * k_dim + key, mask=is_key, other=0.0))
            live = live * kept[:, None]
        else:
            live = live * tl.exp(tl.load(decay + token * heads + head))
        share = tl.load(beta + token * heads + head)
        delta = (one_v - tl.sum(live * one_k[:, None], 0)) * share
        live += one_k[:, None] * delta[None, :]
        tl.store(out + (token * heads + head) * v_dim + value, tl.sum(live * one_q[:, None], 0), mask=is_value)
    tl.store(held, live.to(state.dtype.element_ty), mask=mask)


# ---- launches --------------------------------------------------------------------------------


class Work(NamedTuple):
    """What a pass over chunks leaves to the chain."""

    solved: Tensor  # [chunks, heads, terms, chunk, chunk]
    scores: Tensor  # the same
    factors: Tensor  # [chunks, heads, 4, chunk] float32
    read: Tensor  # [chunks, heads, terms, chunk, keys]; this and the next ones only by feature, else anything
    keep: Tensor
    ask: Tensor
    faded: Tensor  # [chunks, heads, keys] float32


def _work(cut: Tiling, keys: int, heads: int, *, by_feature: bool, max_chunks: int, device: torch.device) -> Work:
    """For as many chunks as the bound lets in, at most `max_chunks`."""
    chunk, terms, out_terms = 2 * cut.part, max(cut.terms, 1), max(cut.out_terms, 1)
    dtype = torch.bfloat16 if cut.terms else torch.float32
    shapes = [((terms, chunk, chunk), dtype), ((out_terms, chunk, chunk), dtype), ((4, chunk), torch.float32)]
    if by_feature:
        of_keys = (terms, chunk, keys)
        shapes += [(of_keys, dtype), (of_keys, dtype), ((out_terms, chunk, keys), dtype), ((keys,), torch.float32)]
    num_bytes = heads * sum(prod(shape) * kind.itemsize for shape, kind in shapes)
    count = min(max_chunks, max(1, WORKSPACE_BYTES // num_bytes))
    made = [torch.empty((count, heads, *shape), dtype=kind, device=device) for shape, kind in shapes]
    return Work(*made) if by_feature else Work(*made, made[0], made[0], made[0], made[2])


def launch_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor, state: Tensor, step: StateRows,
    tuning: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """As `delta_rule`. Needs no lengths on the host.

    Args:
        tuning: of prompts; None takes what suits the model.
    """
    num_tokens, heads, v_dim = v.shape
    out = torch.empty((num_tokens, heads, v_dim), dtype=torch.float32, device=v.device)
    if not num_tokens:
        return out
    k_dim = q.shape[2]
    decay, beta = decay.contiguous(), beta.float().contiguous()
    for x in (q, k, v):
        assert x.stride(2) == 1 and x.stride(1) == x.shape[2]
    assert state[0].is_contiguous() and decay.dtype == torch.float32
    num_context = step.num_context_rows
    if num_context:
        cut = tuning or tiling(q, by_feature=decay.shape[2] > 1)
        _launch_chunks(q, k, v, decay=decay, beta=beta, state=state, step=step, out=out, cut=cut)
    if num_context < len(step.slots):
        grid(_delta_step_kernel, -(-v_dim // STEP_VALUES), heads, len(step.slots) - num_context)(
            q, k, v, decay, beta, state, out, step.slots, step.query_starts,
            num_context, heads, k_dim, v_dim, k_dim**-0.5, q.stride(0), k.stride(0), v.stride(0), state.stride(0),
            GROUP=heads // q.shape[1], BY_FEATURE=decay.shape[2] > 1, KEYS=max(16, power_of_2(k_dim)),
            VALUES=STEP_VALUES, num_warps=4,
        )  # fmt: skip
    return out


def _launch_chunks(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor, state: Tensor, step: StateRows, out: Tensor,
    cut: Tiling,
) -> None:  # fmt: skip
    """The context rows, as many chunks at a time as the workspace holds."""
    num_tokens, heads, v_dim = v.shape
    num_rows, k_dim, by_feature = step.num_context_rows, q.shape[2], decay.shape[2] > 1
    keys, chunk = max(16, power_of_2(k_dim)), 2 * cut.part
    num_chunks = (num_tokens - (len(step.slots) - num_rows)) // chunk + num_rows  # a bound
    work = _work(cut, keys, heads, by_feature=by_feature, max_chunks=num_chunks, device=v.device)
    values = max(16, min(cut.values, power_of_2(v_dim)))
    options = {
        "GROUP": heads // q.shape[1], "KEYS": keys, "TERMS": cut.terms, "OUT_TERMS": cut.out_terms,
        "PRECISION": cut.precision, "COMPUTE": tl.bfloat16 if cut.terms and v.is_cuda else tl.float32,
    }  # fmt: skip
    of_chunks = {
        "SLICE": min(keys, cut.features), "PART": cut.part, "LEVELS": cut.part.bit_length() - 1,
        "num_warps": cut.part_warps, "num_stages": 1,
    }  # fmt: skip
    at_once, strides = len(work.solved), (q.stride(0), k.stride(0))
    for first in range(0, num_chunks, at_once):
        count = min(at_once, num_chunks - first)
        grid(_feature_chunk_kernel if by_feature else _chunk_kernel, heads, count)(
            q, k, decay, beta, step.query_starts, *(work if by_feature else work[:3]),
            first, num_rows, num_rows.bit_length(), heads, k_dim, k_dim**-0.5, *strides, **of_chunks, **options,
        )  # fmt: skip
        grid(_chain_kernel, -(-v_dim // values), heads, num_rows)(
            q, k, v, *work, state, out, step.slots, step.query_starts,
            first, count, heads, k_dim, v_dim, *strides, v.stride(0), state.stride(0),
            BY_FEATURE=by_feature, VALUES=values, CHUNK=chunk, STAGES=cut.stages, num_warps=cut.chain_warps, **options,
        )  # fmt: skip
