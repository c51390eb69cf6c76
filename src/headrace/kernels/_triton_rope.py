"""The Triton kernel of `rope_write`: one pass over the packed projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels.rope_write import HeadScale, Projected

FEW_TOKENS = 64
"""Up to here a token's KV heads go to programs of their own: a single program would be one busy processor."""


@triton.jit
def _inverse_rms(a, b, rest, eps, DIM: tl.constexpr):
    """[heads] of heads whose features are in three parts, absent ones zero."""
    a, b, rest = a.to(tl.float32), b.to(tl.float32), rest.to(tl.float32)
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
    return tl.rsqrt(total / DIM + eps)


@triton.jit
def _scaled(x, inverse, weight, columns, mask, PLUS_ONE: tl.constexpr):
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    wide = x.to(tl.float32) * inverse[:, None]
    if PLUS_ONE:
        return (wide * (1.0 + w)).to(x.dtype)
    else:
        return (w * wide.to(x.dtype).to(tl.float32)).to(x.dtype)


@triton.jit
def _to_cache(x, inverse_scale, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    if IS_FP8:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * inverse_scale, -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def _turn_heads(
    source,
    target,
    target_stride,
    heads,
    head_mask,
    norm_weight,
    eps,
    cos,
    sin,
    inverse_scale,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Norm and turn heads [n], from source + head * DIM to target + head * target_stride."""
    pairs = tl.arange(0, HALF_BLOCK)
    pair_mask = pairs < HALF
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + HALF
    others = 2 * HALF + tl.arange(0, REST_BLOCK)
    other_mask = others < DIM
    at, to = source + heads[:, None] * DIM, target + heads[:, None] * target_stride
    turned, kept = head_mask[:, None] & pair_mask[None, :], head_mask[:, None] & other_mask[None, :]
    a = tl.load(at + first[None, :], mask=turned, other=0.0)
    b = tl.load(at + second[None, :], mask=turned, other=0.0)
    rest = tl.load(at + others[None, :], mask=kept, other=0.0)
    if HAS_NORM:
        inverse = _inverse_rms(a, b, rest, eps, DIM)
        a = _scaled(a, inverse, norm_weight, first, pair_mask, PLUS_ONE)
        b = _scaled(b, inverse, norm_weight, second, pair_mask, PLUS_ONE)
        rest = _scaled(rest, inverse, norm_weight, others, other_mask, PLUS_ONE)
    own = source.dtype.element_ty
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    new_a = (wide_a * cos[None, :] - wide_b * sin[None, :]).to(own)
    new_b = (wide_b * cos[None, :] + wide_a * sin[None, :]).to(own)
    stored = target.dtype.element_ty
    tl.store(to + first[None, :], _to_cache(new_a, inverse_scale, stored, IS_FP8), mask=turned)
    tl.store(to + second[None, :], _to_cache(new_b, inverse_scale, stored, IS_FP8), mask=turned)
    tl.store(to + others[None, :], _to_cache(rest, inverse_scale, stored, IS_FP8), mask=kept)


@triton.jit
def _rope_write_kernel(
    qkv,
    cos,
    sin,
    write_slots,
    k_cache,
    v_cache,
    q_weight,
    k_weight,
    q_eps,
    k_eps,
    inverse_k_scale,
    inverse_v_scale,
    token_stride,
    cos_stride,
    k_block_stride,
    k_head_stride,
    v_block_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    Q_PLUS_ONE: tl.constexpr,
    K_PLUS_ONE: tl.constexpr,
    IS_FP8: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (tokens, parts of KV_BLOCK KV heads and the query heads that read them)."""
    wait_for_predecessor(CHAINED)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    pairs = tl.arange(0, HALF_BLOCK)
    c = tl.load(cos + token * cos_stride + pairs, mask=pairs < HALF, other=1.0)
    s = tl.load(sin + token * cos_stride + pairs, mask=pairs < HALF, other=0.0)
    source = qkv + token * token_stride

    q_index = tl.arange(0, Q_BLOCK)
    q_heads = part * KV_BLOCK * GROUP + q_index
    q_mask = (q_index < KV_BLOCK * GROUP) & (q_heads < NUM_HEADS)
    _turn_heads(
        source, source, DIM, q_heads, q_mask, q_weight, q_eps, c, s, 1.0,
        DIM, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED, HAS_Q_NORM, Q_PLUS_ONE, False,
    )  # fmt: skip

    slot = tl.load(write_slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_heads = part * KV_BLOCK + tl.arange(0, KV_BLOCK)
    kv_mask = kv_heads < NUM_KV_HEADS
    _turn_heads(
        source + NUM_HEADS * DIM, k_cache + block * k_block_stride + offset * DIM, k_head_stride,
        kv_heads, kv_mask, k_weight, k_eps, c, s, inverse_k_scale,
        DIM, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED, HAS_K_NORM, K_PLUS_ONE, IS_FP8,
    )  # fmt: skip

    dims = tl.arange(0, DIM_BLOCK)
    v_mask = kv_mask[:, None] & (dims < DIM)[None, :]
    v_source = source + (NUM_HEADS + NUM_KV_HEADS) * DIM
    values = tl.load(v_source + kv_heads[:, None] * DIM + dims[None, :], mask=v_mask, other=0.0)
    values = _to_cache(values, inverse_v_scale, v_cache.dtype.element_ty, IS_FP8)
    v_target = v_cache + block * v_block_stride + offset * DIM
    tl.store(v_target + kv_heads[:, None] * v_head_stride + dims[None, :], values, mask=v_mask)


def launch_rope_write(
    packed: Projected, k_cache: Tensor, v_cache: Tensor, write_slots: Tensor, *, k_scale: float, v_scale: float
) -> Tensor:
    """The contract of `rope_write`. Works in place: q is a view of the projection."""
    qkv, dim, half = packed.qkv, packed.head_dim, packed.cos.shape[1]
    assert qkv.stride(-1) == 1 and k_cache.stride()[2:] == v_cache.stride()[2:] == (dim, 1)
    assert packed.cos.stride() == packed.sin.stride() and (half == 0 or packed.cos.stride(1) == 1)
    num_tokens = qkv.shape[0]
    kv_block = 1 if num_tokens <= FEW_TOKENS else power_of_2(packed.num_kv_heads)
    group = packed.num_heads // packed.num_kv_heads
    q_block = power_of_2(kv_block * group)
    if num_tokens:
        grid(_rope_write_kernel, num_tokens, -(-packed.num_kv_heads // kv_block))(
            qkv,
            packed.cos,
            packed.sin,
            write_slots,
            k_cache,
            v_cache,
            _weight(packed.q_norm, qkv),
            _weight(packed.k_norm, qkv),
            0.0 if packed.q_norm is None else packed.q_norm.eps,
            0.0 if packed.k_norm is None else packed.k_norm.eps,
            1.0 / k_scale,
            1.0 / v_scale,
            qkv.stride(0),
            packed.cos.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            v_cache.stride(0),
            v_cache.stride(1),
            NUM_HEADS=packed.num_heads,
            NUM_KV_HEADS=packed.num_kv_heads,
            DIM=dim,
            BLOCK_SIZE=k_cache.shape[2],
            HALF=half,
            HALF_BLOCK=power_of_2(max(half, 1)),
            REST_BLOCK=power_of_2(max(dim - 2 * half, 1)),
            DIM_BLOCK=power_of_2(dim),
            KV_BLOCK=kv_block,
            Q_BLOCK=q_block,
            INTERLEAVED=packed.interleaved,
            HAS_Q_NORM=packed.q_norm is not None,
            HAS_K_NORM=packed.k_norm is not None,
            Q_PLUS_ONE=packed.q_norm is not None and packed.q_norm.plus_one,
            K_PLUS_ONE=packed.k_norm is not None and packed.k_norm.plus_one,
            IS_FP8=k_cache.dtype.itemsize == 1,
            **chain_options(qkv, max(1, min(8, q_block * dim // 1024))),
        )
    return packed.heads()[0]


def _weight(norm: HeadScale | None, unused: Tensor) -> Tensor:
    return unused if norm is None else norm.weight
