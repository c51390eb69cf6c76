"""What goes before latent attention: queries and keys are turned, this step's vectors written to the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels._triton_rope import _to_cache
from headrace.kernels.quantise import FP8

WRITE_HEADS, MANY_WRITE_HEADS = 16, 64
"""Query heads that one program turns; in steps of many tokens."""
MANY_TOKENS = 512


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
