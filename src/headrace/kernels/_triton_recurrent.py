"""Recurrent layers in Triton: short convolutions, the delta rule, Mamba-2's state space.

One program goes along one row's tokens with a tile of one head's state in registers: token by token, or a chunk of
tokens at a time as products of small matrices where a head has one decay. Products are in float32; of a model in 16
bits the larger ones on tensor cores, by three products each, which keep all but the last digits of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels.port import StateRows

CONV_TOKENS, CONV_CHANNELS = 16, 128
VALUES = 32
"""Value features of a state tile."""
DELTA_CHUNK, DELTA_ROUNDS = 16, 3
"""Tokens that are solved together: (1 + A)^-1 of a strictly triangular A of that size has that many factors after the
first. Powers of A of larger chunks would lose too many digits."""
SSD_CHUNK, SSD_CHUNK_WARPS = 16, 8
"""With chunks of 32, or with fewer warps, registers spill to memory."""
NORM_EPS = tl.constexpr(1e-6)


def _precision(x: Tensor) -> str:
    """Of the larger products of a chunk."""
    return "ieee" if x.dtype == torch.float32 else "tf32x3"


# ---- short convolution -----------------------------------------------------------------------


@triton.jit
def _conv_kernel(
    x, weight, bias, before, state, out, slots, query_starts,
    first_row, channels, x_stride, before_stride, state_stride,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATHERED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of a row's tokens, rows, tiles of channels). `before`: the old states, by row or by slot."""
    tile, row = tl.program_id(0), tl.program_id(1) + first_row
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    start = tl.load(query_starts + row).to(tl.int64)
    length = tl.load(query_starts + row + 1).to(tl.int64) - start
    if tile * TOKENS < length:
        slot = tl.load(slots + row)
        held = before + (row.to(tl.int64) if IS_GATHERED else slot) * before_stride
        is_channel = channel < channels
        at = tile * TOKENS + tl.arange(0, TOKENS)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(KERNEL):
            seen = at + tap - (KERNEL - 1)
            mask = (at < length)[:, None] & is_channel[None, :]
            new = tl.load(
                x + (start + seen)[:, None] * x_stride + channel[None, :], mask=mask & (seen >= 0)[:, None], other=0.0
            )
            old = tl.load(
                held + channel[None, :] * (KERNEL - 1) + (seen + KERNEL - 1)[:, None],
                mask=mask & (seen < 0)[:, None],
                other=0.0,
            )
            factor = tl.load(weight + channel * KERNEL + tap, mask=is_channel, other=0.0).to(tl.float32)
            total += (new.to(tl.float32) + old.to(tl.float32)) * factor[None, :]
        total = total / (1.0 + tl.exp(-total))
        tl.store(
            out + (start + at)[:, None] * channels + channel[None, :],
            total.to(out.dtype.element_ty),
            mask=(at < length)[:, None] & is_channel[None, :],
        )
        if tile * TOKENS + TOKENS >= length:  # the row's last tile writes its state, from left to right
            kept = state + slot * state_stride
            for place in tl.static_range(KERNEL - 1):
                source = length - (KERNEL - 1) + place
                is_new = tl.where(source >= 0, is_channel, False)
                is_old = tl.where(source >= 0, False, is_channel)
                mine = tl.load(x + (start + source) * x_stride + channel, mask=is_new, other=0.0)
                olds = tl.load(held + channel * (KERNEL - 1) + place + length, mask=is_old, other=0.0)
                value = mine.to(tl.float32) + olds.to(tl.float32)
                tl.store(kept + channel * (KERNEL - 1) + place, value.to(state.dtype.element_ty), mask=is_channel)


def launch_short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: StateRows) -> Tensor:
    """As `short_conv`."""
    num_tokens, channels = x.shape
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    assert x.stride(1) == 1 and weight.is_contiguous() and state[0].is_contiguous()
    options = {"KERNEL": weight.shape[1], "HAS_BIAS": bias is not None, "CHANNELS": CONV_CHANNELS, "num_warps": 4}
    tensors = (x, weight, weight if bias is None else bias)
    places, sizes = (state, out, step.slots, step.query_starts), (channels, x.stride(0))
    num_context, parts = step.num_context_rows, -(-channels // CONV_CHANNELS)
    if num_context:  # a row of several tiles reads its old state while it writes the new one: from a copy
        before = state.index_select(0, step.slots[:num_context])
        longest = max(end - start for start, end in zip(step.context_starts, step.context_starts[1:]))
        grid(_conv_kernel, -(-longest // CONV_TOKENS), num_context, parts)(
            *tensors, before, *places, 0, *sizes, before.stride(0), state.stride(0),
            IS_GATHERED=True, TOKENS=CONV_TOKENS, **options,
        )  # fmt: skip
    if num_context < len(step.slots):
        grid(_conv_kernel, 1, len(step.slots) - num_context, parts)(
            *tensors, state, *places, num_context, *sizes, state.stride(0), state.stride(0),
            IS_GATHERED=False, TOKENS=1, **options,
        )  # fmt: skip
    return out


# ---- delta rule ------------------------------------------------------------------------------


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


@triton.jit
def _delta_chunk_kernel(
    q, k, v, decay, beta, state, out, slots, query_starts,
    heads, k_dim, v_dim, scale,
    q_stride, k_stride, v_stride, state_stride,
    GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, ROUNDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_delta_step_kernel`, for one decay a head, a chunk at a time (Yang et al. 2025)."""
    row, head = tl.program_id(2), tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < k_dim, value < v_dim
    slot = tl.load(slots + row)
    held = state + slot * state_stride + head * k_dim * v_dim + key[:, None] * v_dim + value[None, :]
    mask = is_key[:, None] & is_value[None, :]
    live = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    start = tl.load(query_starts + row).to(tl.int64)
    end = tl.load(query_starts + row + 1).to(tl.int64)
    inside = tl.arange(0, CHUNK)
    is_before = inside[:, None] > inside[None, :]
    one = (inside[:, None] == inside[None, :]).to(tl.float32)
    for begin in range(start, end, CHUNK):
        token = begin + inside
        is_token = token < end
        keys = (head // GROUP) * k_dim + key[None, :]
        both = is_token[:, None] & is_key[None, :]
        some_q = tl.load(q + token[:, None] * q_stride + keys, mask=both, other=0.0).to(tl.float32)
        some_k = tl.load(k + token[:, None] * k_stride + keys, mask=both, other=0.0).to(tl.float32)
        some_q = some_q * (tl.rsqrt(tl.sum(some_q * some_q, 1) + NORM_EPS) * scale)[:, None]
        some_k = some_k * tl.rsqrt(tl.sum(some_k * some_k, 1) + NORM_EPS)[:, None]
        some_v = tl.load(
            v + token[:, None] * v_stride + head * v_dim + value[None, :],
            mask=is_token[:, None] & is_value[None, :],
            other=0.0,
        ).to(tl.float32)
        share = tl.load(beta + token * heads + head, mask=is_token, other=0.0)
        # Tokens behind the row's end decay nothing and write nothing.
        total = tl.cumsum(tl.load(decay + token * heads + head, mask=is_token, other=0.0), 0)
        last = tl.sum(tl.where(inside == CHUNK - 1, total, 0.0), 0)
        between = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
        pairs = tl.dot(some_k, tl.trans(some_k), input_precision=PRECISION) * between * share[:, None]
        power = tl.where(is_before, -pairs, 0.0)
        inverse = one + power
        for _ in tl.static_range(ROUNDS):
            power = tl.dot(power, power, input_precision="ieee")
            inverse += tl.dot(inverse, power, input_precision="ieee")
        grown = tl.exp(total)[:, None]
        wanted = share[:, None] * (some_v - tl.dot(some_k * grown, live, input_precision=PRECISION))
        written = tl.dot(inverse, wanted, input_precision="ieee")
        scores = tl.dot(some_q, tl.trans(some_k), input_precision=PRECISION)
        scores = tl.where(is_before, scores * between, scores * one)
        mixed = tl.dot(some_q * grown, live, input_precision=PRECISION)
        mixed += tl.dot(scores, written, input_precision="ieee")
        tl.store(
            out + (token[:, None] * heads + head) * v_dim + value[None, :],
            mixed,
            mask=is_token[:, None] & is_value[None, :],
        )
        left = some_k * tl.exp(last - total)[:, None]
        live = live * tl.exp(last) + tl.dot(tl.trans(left), written, input_precision=PRECISION)
    tl.store(held, live.to(state.dtype.element_ty), mask=mask)


def launch_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """As `delta_rule`."""
    num_tokens, heads, v_dim = v.shape
    out = torch.empty((num_tokens, heads, v_dim), dtype=torch.float32, device=v.device)
    if not num_tokens:
        return out
    k_dim = q.shape[2]
    decay, beta = decay.contiguous(), beta.float().contiguous()
    for x in (q, k, v):
        assert x.stride(2) == 1 and x.stride(1) == x.shape[2]
    assert state[0].is_contiguous() and decay.dtype == torch.float32
    tensors = (q, k, v, decay, beta, state, out, step.slots, step.query_starts)
    sizes = (heads, k_dim, v_dim, k_dim**-0.5, q.stride(0), k.stride(0), v.stride(0), state.stride(0))
    tiles = -(-v_dim // VALUES)
    by_feature = decay.shape[2] > 1
    num_chunked = 0 if by_feature else step.num_context_rows
    options = {"GROUP": heads // q.shape[1], "KEYS": max(16, power_of_2(k_dim)), "VALUES": VALUES, "num_warps": 4}
    if num_chunked:
        grid(_delta_chunk_kernel, tiles, heads, num_chunked)(
            *tensors, *sizes, CHUNK=DELTA_CHUNK, ROUNDS=DELTA_ROUNDS, PRECISION=_precision(q), **options
        )
    if num_chunked < len(step.slots):
        grid(_delta_step_kernel, tiles, heads, len(step.slots) - num_chunked)(
            *tensors, num_chunked, *sizes, BY_FEATURE=by_feature, **options
        )
    return out


# ---- Mamba-2 ---------------------------------------------------------------------------------


@triton.jit
def _ssd_step_kernel(
    x, b, c, decay, state, out, slots, query_starts,
    first_row, heads, dim, size, x_stride, b_stride, c_stride, state_stride,
    GROUP: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of features, heads, rows). One token a row."""
    row = tl.program_id(2) + first_row
    head = tl.program_id(1)
    feature, place = tl.program_id(0) * VALUES + tl.arange(0, VALUES), tl.arange(0, STATE)
    is_feature, is_place = feature < dim, place < size
    slot = tl.load(slots + row)
    held = state + slot * state_stride + head * dim * size + feature[:, None] * size + place[None, :]
    mask = is_feature[:, None] & is_place[None, :]
    live = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    token = tl.load(query_starts + row).to(tl.int64)
    one_x = tl.load(x + token * x_stride + head * dim + feature, mask=is_feature, other=0.0)
    one_b = tl.load(b + token * b_stride + (head // GROUP) * size + place, mask=is_place, other=0.0).to(tl.float32)
    one_c = tl.load(c + token * c_stride + (head // GROUP) * size + place, mask=is_place, other=0.0).to(tl.float32)
    live = live * tl.exp(tl.load(decay + token * heads + head)) + one_x[:, None] * one_b[None, :]
    tl.store(out + (token * heads + head) * dim + feature, tl.sum(live * one_c[None, :], 1), mask=is_feature)
    tl.store(held, live.to(state.dtype.element_ty), mask=mask)


@triton.jit
def _ssd_chunk_kernel(
    x, b, c, decay, state, out, slots, query_starts,
    heads, dim, size, x_stride, b_stride, c_stride, state_stride,
    GROUP: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_ssd_step_kernel`, a chunk of a row's tokens at a time (Dao and Gu 2024)."""
    row, head = tl.program_id(2), tl.program_id(1)
    feature, place = tl.program_id(0) * VALUES + tl.arange(0, VALUES), tl.arange(0, STATE)
    is_feature, is_place = feature < dim, place < size
    slot = tl.load(slots + row)
    held = state + slot * state_stride + head * dim * size + feature[:, None] * size + place[None, :]
    mask = is_feature[:, None] & is_place[None, :]
    live = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    start = tl.load(query_starts + row).to(tl.int64)
    end = tl.load(query_starts + row + 1).to(tl.int64)
    inside = tl.arange(0, CHUNK)
    is_seen = inside[:, None] >= inside[None, :]
    for begin in range(start, end, CHUNK):
        token = begin + inside
        is_token = token < end
        both = is_token[:, None] & is_place[None, :]
        places = (head // GROUP) * size + place[None, :]
        some_b = tl.load(b + token[:, None] * b_stride + places, mask=both, other=0.0).to(tl.float32)
        some_c = tl.load(c + token[:, None] * c_stride + places, mask=both, other=0.0).to(tl.float32)
        of_x = is_token[:, None] & is_feature[None, :]
        some_x = tl.load(x + token[:, None] * x_stride + head * dim + feature[None, :], mask=of_x, other=0.0)
        total = tl.cumsum(tl.load(decay + token * heads + head, mask=is_token, other=0.0), 0)
        last = tl.sum(tl.where(inside == CHUNK - 1, total, 0.0), 0)
        between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0))
        scores = tl.dot(some_c, tl.trans(some_b), input_precision=PRECISION)
        scores = tl.where(is_seen, scores * between, 0.0)
        mixed = tl.dot(scores, some_x, input_precision=PRECISION)
        mixed += tl.dot(some_c * tl.exp(total)[:, None], tl.trans(live), input_precision=PRECISION)
        tl.store(out + (token[:, None] * heads + head) * dim + feature[None, :], mixed, mask=of_x)
        left = some_x * tl.exp(last - total)[:, None]
        live = live * tl.exp(last) + tl.dot(tl.trans(left), some_b, input_precision=PRECISION)
    tl.store(held, live.to(state.dtype.element_ty), mask=mask)


def launch_ssd(x: Tensor, b: Tensor, c: Tensor, *, decay: Tensor, state: Tensor, step: StateRows) -> Tensor:
    """As `ssd`."""
    num_tokens, heads, dim = x.shape
    out = torch.empty((num_tokens, heads, dim), dtype=torch.float32, device=x.device)
    if not num_tokens:
        return out
    size, decay = b.shape[2], decay.contiguous()
    for part in (x, b, c):
        assert part.stride(2) == 1 and part.stride(1) == part.shape[2]
    assert state[0].is_contiguous() and x.dtype == decay.dtype == torch.float32
    tensors = (x, b, c, decay, state, out, step.slots, step.query_starts)
    sizes = (heads, dim, size, x.stride(0), b.stride(0), c.stride(0), state.stride(0))
    tiles, num_chunked = -(-dim // VALUES), step.num_context_rows
    options = {"GROUP": heads // b.shape[1], "STATE": max(16, power_of_2(size)), "VALUES": VALUES}
    if num_chunked:
        grid(_ssd_chunk_kernel, tiles, heads, num_chunked)(
            *tensors, *sizes, CHUNK=SSD_CHUNK, PRECISION=_precision(b), num_warps=SSD_CHUNK_WARPS, **options
        )
    if num_chunked < len(step.slots):
        grid(_ssd_step_kernel, tiles, heads, len(step.slots) - num_chunked)(
            *tensors, num_chunked, *sizes, num_warps=4, **options
        )
    return out
