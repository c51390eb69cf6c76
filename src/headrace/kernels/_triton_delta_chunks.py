"""The delta rule's pass over chunks in Triton: what does not depend on the state, for all chunks at the same time.

What a chunk's tokens write solves a triangular system (Yang et al. 2025). The pass works out its inverse, and what
queries see of the chunk's own values; `_triton_delta.py` says what the chain makes of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NORM_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
"""Passes over chunks take powers of 2: those of e are several instructions each."""
MILD = tl.constexpr(-110.0)
"""Products of two factors, each decayed from or to the middle of so many halvings, stay well inside float32."""


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
def _cross(a, b, total, IS_HALF: tl.constexpr, COMPUTE: tl.constexpr):
    """total + a @ b, of float32 numbers that are about one at most"""
    if IS_HALF:
        total = tl.dot(a.to(tl.float16).to(COMPUTE), b.to(tl.float16).to(COMPUTE), total)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _wide_cross(a, b, total, IS_HALF: tl.constexpr, WIDE: tl.constexpr):
    """total + a @ b, of any float32 numbers: each as the sum of two of bfloat16, which keeps 16 of its bits"""
    if not IS_HALF:
        return tl.dot(a, b, total, input_precision="ieee")
    high_a, high_b = _high(a), _high(b)
    low_a, low_b = (a - high_a).to(tl.bfloat16).to(WIDE), (b - high_b).to(tl.bfloat16).to(WIDE)
    high_a, high_b = high_a.to(WIDE), high_b.to(WIDE)
    return tl.dot(high_a, high_b, tl.dot(high_a, low_b, tl.dot(low_a, high_b, total)))


@triton.jit
def _inverse(pairs, at, LEVELS: tl.constexpr, IS_HALF: tl.constexpr, COMPUTE: tl.constexpr):
    """(1 + pairs)^-1 of strictly triangular pairs [2^LEVELS, 2^LEVELS]: blocks of two, then each twice as large.

    Powers of pairs would be as many products, but keys that are alike make them large, and digits are lost.
    """
    row, column = at[:, None], at[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -pairs, 0.0))
    for level in tl.static_range(1, LEVELS):
        is_between = (row >> level != column >> level) & (row >> (level + 1) == column >> (level + 1))
        part = tl.where(is_between, -pairs, 0.0)
        part = _cross(inverse, part, tl.zeros_like(pairs), IS_HALF, COMPUTE)
        inverse = _cross(part, inverse, inverse, IS_HALF, COMPUTE)
    return inverse


@triton.jit
def _store_blocks(place, first, across, second, at, PART: tl.constexpr):
    """A lower triangular matrix [2 * PART, 2 * PART] by its blocks."""
    place += at[:, None] * (2 * PART) + at[None, :]
    tl.store(place, first)
    tl.store(place + PART, tl.zeros_like(first))
    tl.store(place + 2 * PART * PART, across)
    tl.store(place + 2 * PART * PART + PART, second)


@triton.jit
def _store_matrices(
    solved, place, pairs0, pairs10, pairs1, scores0, scores10, scores1, share0, share1, left0, left1, at,
    PART: tl.constexpr, LEVELS: tl.constexpr, IS_HALF: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """By blocks: the inverse of 1 + pairs, its columns times the betas, and below it the scores times that. Rows of the
    first are multiplied by `left` besides.
    """
    is_seen, is_before, none = at[:, None] >= at[None, :], at[:, None] > at[None, :], tl.zeros_like(pairs10)
    inverse0 = _inverse(tl.where(is_before, pairs0, 0.0), at, LEVELS, IS_HALF, COMPUTE)
    inverse1 = _inverse(tl.where(is_before, pairs1, 0.0), at, LEVELS, IS_HALF, COMPUTE)
    inverse10 = _cross(inverse1, -pairs10, none, IS_HALF, COMPUTE)
    inverse10 = _cross(inverse10, inverse0, none, IS_HALF, COMPUTE) * share0[None, :]
    inverse0, inverse1 = inverse0 * share0[None, :], inverse1 * share1[None, :]
    solved += place * (8 * PART * PART)
    left0, left1 = left0[:, None], left1[:, None]
    _store_blocks(solved, inverse0 * left0, inverse10 * left1, inverse1 * left1, at, PART)
    scores0, scores1 = tl.where(is_seen, scores0, 0.0), tl.where(is_seen, scores1, 0.0)
    seen10 = _cross(scores1, inverse10, none, IS_HALF, COMPUTE)
    seen10 = _cross(scores10, inverse0, seen10, IS_HALF, COMPUTE)
    seen0 = _cross(scores0, inverse0, none, IS_HALF, COMPUTE)
    seen1 = _cross(scores1, inverse1, none, IS_HALF, COMPUTE)
    _store_blocks(solved + 4 * PART * PART, seen0, seen10, seen1, at, PART)


@triton.jit
def _load_pair(x, place, distance, mask0, mask1):
    """At x + place, and `distance` behind."""
    return tl.load(x + place, mask=mask0, other=0.0), tl.load(x + distance + place, mask=mask1, other=0.0)


@triton.jit
def _load_parts(x, at, stride, feature, dim, is_token0, is_token1, PART: tl.constexpr):
    """Of both halves of a chunk [PART, features], with zeros behind `dim` and behind the row's end."""
    mask0, mask1 = is_token0[:, None] & (feature < dim), is_token1[:, None] & (feature < dim)
    return _load_pair(x, at[:, None] * stride + feature, PART * stride, mask0, mask1)


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
def _norm(pairs, at):
    """What norms the keys, of their own products."""
    return tl.rsqrt(tl.sum(tl.where(at[:, None] == at[None, :], pairs, 0.0), 1) + NORM_EPS)


@triton.jit
def _cut(x):
    """x > 0 -> (a power of two above it, at most its double; their quotient, a half to one)"""
    bits = x.to(tl.int32, bitcast=True)
    power = ((bits & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)
    return power, ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)


@triton.jit
def _store_rows(
    read, x, power0, power1, at, stride, dim, is_token0, is_token1,
    KEYS: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A chunk's keys or queries times powers of two: [2 * PART, KEYS] at `read`."""
    for begin in range(0, KEYS, SLICE):
        key = (begin + tl.arange(0, SLICE))[None, :]
        x0, x1 = _load_parts(x, at, stride, key, dim, is_token0, is_token1, PART)
        place = at[:, None] * KEYS + key
        tl.store(read + place, x0.to(tl.float32) * power0[:, None])
        tl.store(read + PART * KEYS + place, x1.to(tl.float32) * power1[:, None])


@triton.jit
def _products(
    q, k, v, at, is_token0, is_token1, k_dim, v_dim, q_stride, k_stride, v_stride,
    SPAN: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A chunk's products of keys, and of queries and keys, by blocks; squares of queries; largest values by place."""
    none, zero = tl.zeros((PART, PART), tl.float32), tl.zeros((PART,), tl.float32)
    pairs0, pairs10, pairs1, scores0, scores10, scores1 = none, none, none, none, none, none
    asks0, asks1 = zero, zero
    most = tl.zeros((PART, SLICE), tl.float32)
    for begin in range(0, SPAN, SLICE):
        key = (begin + tl.arange(0, SLICE))[None, :]
        v0, v1 = _load_parts(v, at, v_stride, key, v_dim, is_token0, is_token1, PART)
        k0, k1 = _load_parts(k, at, k_stride, key, k_dim, is_token0, is_token1, PART)
        q0, q1 = _load_parts(q, at, q_stride, key, k_dim, is_token0, is_token1, PART)
        asks0, asks1 = asks0 + _squares(q0), asks1 + _squares(q1)
        k0, k1, q0, q1 = k0.to(WIDE), k1.to(WIDE), q0.to(WIDE), q1.to(WIDE)
        pairs0 = tl.dot(k0, tl.trans(k0), pairs0, input_precision="ieee")
        pairs10 = tl.dot(k1, tl.trans(k0), pairs10, input_precision="ieee")
        pairs1 = tl.dot(k1, tl.trans(k1), pairs1, input_precision="ieee")
        scores0 = tl.dot(q0, tl.trans(k0), scores0, input_precision="ieee")
        scores10 = tl.dot(q1, tl.trans(k0), scores10, input_precision="ieee")
        scores1 = tl.dot(q1, tl.trans(k1), scores1, input_precision="ieee")
        most = tl.maximum(most, tl.maximum(tl.abs(v0.to(tl.float32)), tl.abs(v1.to(tl.float32))))
    return pairs0, pairs10, pairs1, scores0, scores10, scores1, asks0, asks1, most


@triton.jit
def chunk_kernel(
    q, k, v, decay, beta, query_starts, solved, factors, peaks, read,
    first, num_rows, num_rounds, heads, k_dim, v_dim, scale, q_stride, k_stride, v_stride,
    GROUP: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, IS_HALF: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs: (heads, chunks). What the chain needs of a chunk, for one decay a head.

    `factors`: [chunks, heads, 2, 2 * PART], what products of keys and of queries with the state are multiplied with.
    `peaks`: [chunks, heads, 2], the largest value and what is left of the state.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    end, at_chunk = _chunk_of(first + index, query_starts, num_rows, num_rounds, 2 * PART)
    at, place, num_tokens = tl.arange(0, PART), index * heads + head, (end - at_chunk).to(tl.int32)
    if num_tokens <= 0:
        return
    is_token0, is_token1 = at < num_tokens, at + PART < num_tokens
    q += at_chunk * q_stride + (head // GROUP) * k_dim
    k += at_chunk * k_stride + (head // GROUP) * k_dim
    v += at_chunk * v_stride + head * v_dim
    decay, beta = decay + at_chunk * heads + head, beta + at_chunk * heads + head
    # Tokens behind the row's end decay nothing and write nothing.
    share0, share1 = _load_pair(beta, at * heads, PART * heads, is_token0, is_token1)
    decay0, decay1 = _load_pair(decay, at * heads, PART * heads, is_token0, is_token1)
    pairs0, pairs10, pairs1, scores0, scores10, scores1, asks0, asks1, most = _products(
        q, k, v, at, is_token0, is_token1, k_dim, v_dim, q_stride, k_stride, v_stride, SPAN, SLICE, PART, WIDE
    )
    unit0, unit1 = _norm(pairs0, at), _norm(pairs1, at)
    asks0, asks1 = tl.rsqrt(asks0 + NORM_EPS) * scale, tl.rsqrt(asks1 + NORM_EPS) * scale
    power0, rest0 = _cut(unit0)
    power1, rest1 = _cut(unit1)
    ask_power0, ask_rest0 = _cut(asks0)
    ask_power1, ask_rest1 = _cut(asks1)
    if head % GROUP == 0:
        read += (index * (heads // GROUP) + head // GROUP) * (4 * PART * KEYS)
        _store_rows(read, k, power0, power1, at, k_stride, k_dim, is_token0, is_token1, KEYS, SLICE, PART)
        read += 2 * PART * KEYS
        _store_rows(read, q, ask_power0, ask_power1, at, q_stride, k_dim, is_token0, is_token1, KEYS, SLICE, PART)
    total0, sum0, total1, sum1 = _sums(decay0, decay1)
    between0 = tl.exp2(tl.minimum(total0[:, None] - total0[None, :], 0.0)) * unit0[None, :]
    between1 = tl.exp2(tl.minimum(total1[:, None] - total1[None, :], 0.0)) * unit1[None, :]
    grown0, grown1, left0, left1 = tl.exp2(total0), tl.exp2(total1), tl.exp2(sum0 - total0), tl.exp2(sum1 - total1)
    across, factors = grown1[:, None] * (unit0 * left0)[None, :], factors + place * (4 * PART) + at
    kept, written = tl.exp2(sum0), tl.exp2(sum1)
    tl.store(factors, -rest0 * grown0)
    tl.store(factors + PART, -rest1 * (grown1 * kept))
    tl.store(factors + 2 * PART, ask_rest0 * grown0)
    tl.store(factors + 3 * PART, ask_rest1 * (grown1 * kept))
    tl.store(peaks + 2 * place + 1, kept * written)
    tl.store(peaks + 2 * place, tl.max(tl.max(most, 1), 0))
    unit0, unit1, left0, left1 = unit0 * share0, unit1 * share1, rest0 * left0 * written, rest1 * left1
    _store_matrices(
        solved, place, pairs0 * unit0[:, None] * between0, pairs10 * unit1[:, None] * across,
        pairs1 * unit1[:, None] * between1, scores0 * asks0[:, None] * between0, scores10 * asks1[:, None] * across,
        scores1 * asks1[:, None] * between1, share0, share1, left0, left1, at, PART, LEVELS, IS_HALF, COMPUTE,
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
    PART: tl.constexpr, IS_HALF: tl.constexpr, WIDE: tl.constexpr,
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
        pairs0 = _wide_cross(k0 * from0, other0, pairs0, IS_HALF, WIDE)
        scores0 = _wide_cross(q0 * from0, other0, scores0, IS_HALF, WIDE)
        k1, q1 = k1 * from1, q1 * from1
        pairs1 = _wide_cross(k1, other1, pairs1, IS_HALF, WIDE)
        scores1 = _wide_cross(q1, other1, scores1, IS_HALF, WIDE)
        pairs10 = _wide_cross(k1, other10, pairs10, IS_HALF, WIDE)
        scores10 = _wide_cross(q1, other10, scores10, IS_HALF, WIDE)
    else:
        left0, left1 = (
            tl.exp2(tl.minimum(sum0[None, :] - total0, 0.0)),
            tl.exp2(tl.minimum(sum1[None, :] - total1, 0.0)),
        )
        pairs0, scores0 = _strong(pairs0, scores0, k0, q0, total0, at, PART)
        pairs1, scores1 = _strong(pairs1, scores1, k1, q1, total1, at, PART)
        other10 = tl.trans(k0 * left0)
        pairs10 = _wide_cross(k1 * grown1, other10, pairs10, IS_HALF, WIDE)
        scores10 = _wide_cross(q1 * grown1, other10, scores10, IS_HALF, WIDE)
    return pairs0, pairs10, pairs1, scores0, scores10, scores1, left0, left1


@triton.jit
def _lengths(
    q, k, v, at, is_token0, is_token1, k_dim, v_dim, scale, q_stride, k_stride, v_stride,
    SPAN: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What norms a chunk's keys and queries [PART, 1], the latter times `scale`; largest values by place."""
    zero = tl.zeros((PART,), tl.float32)
    unit0, unit1, asks0, asks1 = zero, zero, zero, zero
    most = tl.zeros((PART, SLICE), tl.float32)
    for begin in range(0, SPAN, SLICE):
        key = (begin + tl.arange(0, SLICE))[None, :]
        v0, v1 = _load_parts(v, at, v_stride, key, v_dim, is_token0, is_token1, PART)
        k0, k1 = _load_parts(k, at, k_stride, key, k_dim, is_token0, is_token1, PART)
        q0, q1 = _load_parts(q, at, q_stride, key, k_dim, is_token0, is_token1, PART)
        unit0, unit1 = unit0 + _squares(k0), unit1 + _squares(k1)
        asks0, asks1 = asks0 + _squares(q0), asks1 + _squares(q1)
        most = tl.maximum(most, tl.maximum(tl.abs(v0.to(tl.float32)), tl.abs(v1.to(tl.float32))))
    unit0, unit1 = tl.rsqrt(unit0 + NORM_EPS)[:, None], tl.rsqrt(unit1 + NORM_EPS)[:, None]
    asks0, asks1 = (tl.rsqrt(asks0 + NORM_EPS) * scale)[:, None], (tl.rsqrt(asks1 + NORM_EPS) * scale)[:, None]
    return unit0, unit1, asks0, asks1, most


@triton.jit
def feature_chunk_kernel(
    q, k, v, decay, beta, query_starts, solved, faded, peaks, read, keep,
    first, num_rows, num_rounds, heads, k_dim, v_dim, scale, q_stride, k_stride, v_stride,
    GROUP: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, SLICE: tl.constexpr, PART: tl.constexpr,
    LEVELS: tl.constexpr, IS_HALF: tl.constexpr, COMPUTE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `chunk_kernel`, for a decay by key feature, some features at a time. `read`: keys, then queries, decayed from
    the chunk's begin. `keep`: keys decayed to its end. `faded`: what is left of the state.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    end, at_chunk = _chunk_of(first + index, query_starts, num_rows, num_rounds, 2 * PART)
    at, place, num_tokens = tl.arange(0, PART), index * heads + head, (end - at_chunk).to(tl.int32)
    if num_tokens <= 0:
        return
    is_token0, is_token1 = at < num_tokens, at + PART < num_tokens
    q += at_chunk * q_stride + (head // GROUP) * k_dim
    k += at_chunk * k_stride + (head // GROUP) * k_dim
    v += at_chunk * v_stride + head * v_dim
    decay, beta = decay + (at_chunk * heads + head) * k_dim, beta + at_chunk * heads + head
    none, zero = tl.zeros((PART, PART), tl.float32), tl.zeros((PART,), tl.float32)
    pairs0, pairs10, pairs1, scores0, scores10, scores1 = none, none, none, none, none, none
    unit0, unit1, asks0, asks1, most = _lengths(
        q, k, v, at, is_token0, is_token1, k_dim, v_dim, scale, q_stride, k_stride, v_stride,
        SPAN, 4 * SLICE, PART,
    )  # fmt: skip
    read, keep, faded = read + place * (4 * PART * KEYS), keep + place * (2 * PART * KEYS), faded + place * KEYS
    for begin in range(0, KEYS, SLICE):
        key = (begin + tl.arange(0, SLICE))[None, :]
        k0, k1 = _load_parts(k, at, k_stride, key, k_dim, is_token0, is_token1, PART)
        q0, q1 = _load_parts(q, at, q_stride, key, k_dim, is_token0, is_token1, PART)
        decay0, decay1 = _load_parts(decay, at, heads * k_dim, key, k_dim, is_token0, is_token1, PART)
        k0, k1 = k0.to(tl.float32) * unit0, k1.to(tl.float32) * unit1
        q0, q1 = q0.to(tl.float32) * asks0, q1.to(tl.float32) * asks1
        total0, sum0, total1, sum1 = _sums(decay0, decay1)
        grown0, grown1, kept, written = tl.exp2(total0), tl.exp2(total1), tl.exp2(sum0), tl.exp2(sum1)
        pairs0, pairs10, pairs1, scores0, scores10, scores1, left0, left1 = _decayed_products(
            pairs0, pairs10, pairs1, scores0, scores10, scores1, k0, k1, q0, q1, total0, total1, sum0, sum1,
            grown0, grown1, at, PART, IS_HALF, WIDE,
        )  # fmt: skip
        tile = at[:, None] * KEYS + key
        at_keep, at_read = keep + tile, read + tile
        tl.store(at_keep, k0 * (left0 * written[None, :]))
        tl.store(at_keep + PART * KEYS, k1 * left1)
        tl.store(at_read, -k0 * grown0)
        tl.store(at_read + 2 * PART * KEYS, q0 * grown0)
        grown1 *= kept[None, :]
        tl.store(at_read + PART * KEYS, -k1 * grown1)
        tl.store(at_read + 3 * PART * KEYS, q1 * grown1)
        tl.store(faded + begin + tl.arange(0, SLICE), kept * written)
    tl.store(peaks + 2 * place, tl.max(tl.max(most, 1), 0))
    share0, share1 = _load_pair(beta, at * heads, PART * heads, is_token0, is_token1)
    row0, row1 = share0[:, None], share1[:, None]
    _store_matrices(
        solved, place, pairs0 * row0, pairs10 * row1, pairs1 * row1, scores0, scores10, scores1,
        share0, share1, zero + 1.0, zero + 1.0, at, PART, LEVELS, IS_HALF, COMPUTE,
    )  # fmt: skip
