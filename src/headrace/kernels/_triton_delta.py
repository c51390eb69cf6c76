"""The delta rule in Triton: a prompt's chunks all at once, then a chain over them; single tokens token by token.

The pass over chunks (`_triton_delta_chunks.py`) leaves of each chunk what does not depend on the state. The chain then
takes three products a chunk, one after the other, with a tile of one head's state in registers.

In 16-bit models factors are float16, sums float32. Keys and queries are brought to a length of about one by powers of
two, so they stay exact; what is rounded has 11 bits, three more than bfloat16. Float16 ends at 65,504: the chain works
on states and values times a power of two that makes the largest of what it is given 8 to 16. No decay is positive and
no share is above one, so n tokens from a state of d key features yield numbers at most sqrt(n + d) times as large.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels._triton_delta_chunks import NORM_EPS, chunk_kernel, feature_chunk_kernel
from headrace.kernels.port import StateRows

STEP_VALUES = 32
"""Value features of a state tile where rows have one token each."""
WORKSPACE_BYTES = 256 << 20
"""Bounds what a pass over chunks leaves to the chain; a longer step goes by segments, with the states in the pool."""


class Tiling(NamedTuple):
    """How a prompt's tokens are cut."""

    part: int
    """Half a chunk: tokens of a block of pairs."""
    features: int
    """Key features that a pass over chunks takes at a time."""
    values: int
    """Value features of a state tile; a head of more has several."""
    part_warps: int
    part_stages: int
    """Slices of key features that are on their way to a pass over chunks at the same time."""
    chain_warps: int
    stages: int
    """Chunks whose operands are on their way to the chain at the same time."""
    is_half: bool
    """Multiplies float16 numbers, else float32."""


HALF = Tiling(16, 32, 64, part_warps=1, part_stages=3, chain_warps=4, stages=3, is_half=True)
FLOAT16 = HALF._replace(part_stages=2)
"""A third slice would spill registers."""
HALF_BY_FEATURE = HALF._replace(features=16, part_stages=1)
FLOAT32 = Tiling(16, 16, 32, part_warps=2, part_stages=1, chain_warps=8, stages=1, is_half=False)


def tiling(x: Tensor, *, by_feature: bool) -> Tiling:
    """For a model in the type of x."""
    if x.dtype == torch.float32:
        return FLOAT32
    if by_feature:
        return HALF_BY_FEATURE
    return FLOAT16 if x.dtype == torch.float16 else HALF


# ---- the chain over chunks -------------------------------------------------------------------


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[rows, 2 * columns] -> its left and its right half"""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS)), (0, 2, 1)))


@triton.jit
def _product(a, b, total, IS_HALF: tl.constexpr, COMPUTE: tl.constexpr):
    """total + a @ b. a, total: float32."""
    if IS_HALF:
        total = tl.dot(a.to(tl.float16).to(COMPUTE), b.to(COMPUTE), total)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _range_of(live, peaks, begin, stop, step, PEAKS: tl.constexpr):
    """-> (a power of two that makes the largest of states and values 8 to 16, its inverse)"""
    peak = tl.max(tl.max(tl.abs(live), 1), 0)
    for at in range(begin, stop, PEAKS):
        chunk = at + tl.arange(0, PEAKS)
        peak = tl.maximum(peak, tl.max(tl.load(peaks + chunk * step, mask=chunk < stop, other=0.0), 0))
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 27)
    return ((257 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 3) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _chain_kernel(
    v, solved, factors, peaks, read, keep, state, out, slots, query_starts,
    first, count, heads, k_dim, v_dim, v_stride, state_stride,
    GROUP: tl.constexpr, BY_FEATURE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    IS_HALF: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of values, heads, rows). A row's chunks among the `count` from `first` on.

    States and all that is summed lie across, by value first: so they go from one product to the next in registers. A
    product waits for the one before it, so keys and queries share theirs, and what is written and what is seen of it.
    """
    row, head = tl.program_id(2), tl.program_id(1)
    start, end = tl.load(query_starts + row).to(tl.int64), tl.load(query_starts + row + 1)
    base = (start // CHUNK).to(tl.int32) + row - first
    begin, stop = tl.maximum(-base, 0), tl.minimum(tl.cdiv((end - start).to(tl.int32), CHUNK), count - base)
    if begin >= stop:
        return
    value, key, inside = tl.program_id(0) * VALUES + tl.arange(0, VALUES), tl.arange(0, KEYS), tl.arange(0, CHUNK)
    is_value, is_key, twice = (value < v_dim)[:, None], (key < k_dim)[None, :], tl.arange(0, 2 * CHUNK)
    held = head * k_dim * v_dim + key[None, :] * v_dim + value[:, None]
    live = tl.load(state + tl.load(slots + row) * state_stride + held, mask=is_value & is_key, other=0.0).to(tl.float32)
    up, down = 1.0, 1.0
    if IS_HALF:
        up, down = _range_of(live, peaks + 2 * (base * heads + head), begin, stop, 2 * heads, 128)
        live *= up
    square, tile = twice[:, None] * CHUNK + inside[None, :], inside[:, None] * KEYS + key[None, :]
    for chunk in tl.range(begin, stop, num_stages=STAGES):
        place, begins = (base + chunk) * heads + head, start + chunk * CHUNK
        is_token = inside < (end - begins).to(tl.int32)
        of_v = v + begins * v_stride + head * v_dim + (inside[:, None] * v_stride + value[None, :])
        new = tl.load(of_v, mask=is_token[:, None] & (value < v_dim)[None, :], other=0.0)
        matrices = tl.load(solved + place * (2 * CHUNK * CHUNK) + square)
        of_rows = place if BY_FEATURE else (base + chunk) * (heads // GROUP) + head // GROUP
        reads = tl.load(read + of_rows * (2 * CHUNK * KEYS) + (twice[:, None] * KEYS + key[None, :]))
        none = tl.zeros((VALUES, 2 * CHUNK), tl.float32)
        both = _product(tl.trans(new).to(tl.float32) * up, tl.trans(matrices), none, IS_HALF, COMPUTE)
        found = _product(live, tl.trans(reads), none, IS_HALF, COMPUTE)
        if not BY_FEATURE:
            found *= tl.load(factors + place * (2 * CHUNK) + twice)[None, :]
        known, seen = _halves(found, VALUES, CHUNK)
        both = _product(known, tl.trans(matrices), both, IS_HALF, COMPUTE)
        written, mixed = _halves(both, VALUES, CHUNK)
        mixed += seen
        of_out = out + (begins * heads + head) * v_dim + (inside[None, :] * (heads * v_dim) + value[:, None])
        tl.store(of_out, mixed * down, mask=is_token[None, :] & is_value)
        if BY_FEATURE:
            keeps = tl.load(keep + place * (CHUNK * KEYS) + tile)
            live *= tl.load(factors + place * KEYS + key)[None, :]
        else:
            keeps = tl.load(read + of_rows * (2 * CHUNK * KEYS) + tile)
            live *= tl.load(peaks + 2 * place + 1)
        live = _product(written, keeps, live, IS_HALF, COMPUTE)
    # Addresses are worked out again: kept over the loop they would take registers from it.
    held += tl.load(slots + row) * state_stride
    tl.store(state + held, (live * down).to(state.dtype.element_ty), mask=is_value & is_key)


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
    """What a pass over chunks leaves to the chain; float16 or float32 where no type is said."""

    solved: Tensor  # [chunks, heads, 2 * chunk, chunk]
    factors: Tensor  # [chunks, heads, 2 * chunk] float32; by feature [chunks, heads, keys], what is left of the state
    peaks: Tensor  # [chunks, heads, 2] float32
    read: Tensor  # [chunks, k_heads, 2 * chunk, keys]; by feature each head has its own
    keep: Tensor  # [chunks, heads, chunk, keys]; only by feature, else anything


def _work(
    cut: Tiling, keys: int, heads: int, *, k_heads: int, by_feature: bool, max_chunks: int, device: torch.device
) -> Work:
    """For as many chunks as the bound lets in, at most `max_chunks`."""
    chunk, dtype = 2 * cut.part, torch.float16 if cut.is_half else torch.float32
    shapes = [
        ((heads, 2 * chunk, chunk), dtype),
        ((heads, keys if by_feature else 2 * chunk), torch.float32),
        ((heads, 2), torch.float32),
        ((heads if by_feature else k_heads, 2 * chunk, keys), dtype),
    ]
    if by_feature:
        shapes.append(((heads, chunk, keys), dtype))
    num_bytes = sum(prod(shape) * kind.itemsize for shape, kind in shapes)
    count = min(max_chunks, max(1, WORKSPACE_BYTES // num_bytes))
    made = [torch.empty((count, *shape), dtype=kind, device=device) for shape, kind in shapes]
    return Work(*made) if by_feature else Work(*made, made[-1])


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
    work = _work(cut, keys, heads, k_heads=q.shape[1], by_feature=by_feature, max_chunks=num_chunks, device=v.device)
    values = max(16, min(cut.values, power_of_2(v_dim)))
    kind = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(q.dtype, tl.float32)
    exact, half = (kind, tl.float16) if v.is_cuda else (tl.float32, tl.float32)  # the interpreter has no bfloat16
    options = {
        "GROUP": heads // q.shape[1], "KEYS": keys, "IS_HALF": cut.is_half,
        "COMPUTE": half if cut.is_half else tl.float32,
    }  # fmt: skip
    of_chunks = {
        "SPAN": max(keys, power_of_2(v_dim)), "SLICE": min(keys, cut.features), "PART": cut.part,
        "LEVELS": cut.part.bit_length() - 1, "num_warps": cut.part_warps, "num_stages": cut.part_stages,
        "WIDE": tl.bfloat16 if by_feature and exact != tl.float32 else exact,
    }  # fmt: skip
    at_once, strides = len(work.solved), (q.stride(0), k.stride(0), v.stride(0))
    for first in range(0, num_chunks, at_once):
        count = min(at_once, num_chunks - first)
        grid(feature_chunk_kernel if by_feature else chunk_kernel, heads, count)(
            q, k, v, decay, beta, step.query_starts, *(work if by_feature else work[:4]),
            first, num_rows, num_rows.bit_length(), heads, k_dim, v_dim, k_dim**-0.5, *strides, **of_chunks, **options,
        )  # fmt: skip
        grid(_chain_kernel, -(-v_dim // values), heads, num_rows)(
            v, *work, state, out, step.slots, step.query_starts,
            first, count, heads, k_dim, v_dim, v.stride(0), state.stride(0),
            BY_FEATURE=by_feature, VALUES=values, CHUNK=chunk, STAGES=cut.stages, num_warps=cut.chain_warps, **options,
        )  # fmt: skip
