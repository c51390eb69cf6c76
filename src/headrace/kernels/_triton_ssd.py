"""Mamba-2's state space in Triton: prompts in pieces that go on at the same time, and single tokens.

A program walks the chunks of one piece of a row with a head's state in registers (Dao and Gu 2024). What a chunk's
tokens need of each other is worked out before, for all chunks at once. Where rows have several pieces, another pass
works out what each piece adds to a state of zero, and a third one makes of that the state before each piece. Pieces
are as long as leaves enough of them for a GPU: what goes through memory is one state a piece, not one a chunk.

In a bfloat16 model x, b and c are exact factors. What is in float32 becomes the sum of bfloat16 numbers where it is
multiplied, so that products run at the tensor cores' full rate: of two where states come of it, which keep 16 bits, and
of one where outputs do, which costs them less than rounding x, b and c did. States are summed in float32. They are
[features, state] here: then what is worked out is a product's left factor, which may come from registers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import HOPPER_BYTES, grid, power_of_2, shared_bytes
from headrace.kernels.port import StateRows

STEP_VALUES = 32
"""Features of a state tile where rows have one token each."""
PROGRAMS = 396
"""Pieces get no shorter than leaves about as many programs, which an H200 runs at once."""
MAX_PLACE = (1 << 31) - 1
CHAIN_BLOCK = 1024
"""Numbers of a state that a program of the chain over pieces carries."""
HEAD_BLOCK = 32
"""Heads whose decays are summed together."""

ROW_BLOCK = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-37)
"""The least step size whose logarithm is taken."""
LARGE = tl.constexpr(120.0)
"""2 to its power is a number, of which 0 times is 0."""


class Tiling(NamedTuple):
    """How prompts are cut."""

    chunk: int
    """Tokens of a chunk."""
    max_tile: int
    """Numbers of a state tile: a head's state has one or more, of some of its features each."""
    warps: int
    stages: int
    terms: int
    """bfloat16 numbers that one in float32 is split into where states that are kept come of it; 0 multiplies in
    float32."""
    out_terms: int
    """The same where outputs come of it."""
    precision: str
    """Of products in float32."""
    registers: tuple[int, int] | None = None
    """The most that threads have where pieces are worked out, and where outputs are."""


HALVES = Tiling(32, 64 * 128, 4, 3, terms=2, out_terms=1, precision="ieee", registers=(128, 168))
"""Of bfloat16. Four programs that work out pieces share a multiprocessor, and three that work out outputs."""
LARGE_HALVES = HALVES._replace(max_tile=64 * 256, registers=None)
"""For states of more than 128."""
WIDENED = Tiling(16, 32 * 128, 8, 1, terms=0, out_terms=0, precision="tf32x3")
TILINGS = {
    torch.bfloat16: HALVES,
    torch.float16: WIDENED,
    torch.float32: WIDENED._replace(max_tile=16 * 128, precision="ieee"),
}
"""By the model's type. With larger tiles, or fewer warps, registers spill to memory."""


def tiling(dtype: torch.dtype, size: int, *, room: int = HOPPER_BYTES) -> Tiling:
    """For states of this size. room: bytes of shared memory."""
    how = TILINGS[dtype]
    if how is not HALVES or size <= 128:
        return how
    return LARGE_HALVES if room >= HOPPER_BYTES else LARGE_HALVES._replace(stages=2)


# ---- prompts ---------------------------------------------------------------------------------


@triton.jit
def _row_of(index, query_starts, num_rows, PIECE, EXTRA: tl.constexpr):
    """The last row whose pieces begin at or before this place: a row's first is at start // PIECE + EXTRA * row.

    All rows are asked at once: a search would wait for memory several times."""
    num_before = 0
    for first in range(0, num_rows, ROW_BLOCK):
        row = first + tl.arange(0, ROW_BLOCK)
        start = tl.load(query_starts + row, mask=row < num_rows, other=0)
        is_before = (start // PIECE + EXTRA * row <= index) & (row < num_rows)
        num_before += tl.sum(is_before.to(tl.int32), 0)
    return num_before - 1


@triton.jit
def _high(a, TERMS: tl.constexpr):
    """What the first bfloat16 number is made of: of several, the upper bits, which are faster had than rounded ones."""
    if TERMS > 1:
        return (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        return a


@triton.jit
def _left_product(a, exact, total, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """total + a @ exact. a: float32; exact: what COMPUTE holds."""
    if TERMS == 0:
        return tl.dot(a, exact, total, input_precision=PRECISION)
    high = _high(a, TERMS)
    total = tl.dot(high.to(tl.bfloat16).to(COMPUTE), exact, total)
    if TERMS > 1:
        total = tl.dot((a - high).to(tl.bfloat16).to(COMPUTE), exact, total)
    return total


@triton.jit
def _right_product(exact, a, total, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """total + exact @ a."""
    if TERMS == 0:
        return tl.dot(exact, a, total, input_precision=PRECISION)
    high = _high(a, TERMS)
    total = tl.dot(exact, high.to(tl.bfloat16).to(COMPUTE), total)
    if TERMS > 1:
        total = tl.dot(exact, (a - high).to(tl.bfloat16).to(COMPUTE), total)
    return total


@triton.jit
def _load(place, mask, WHOLE: tl.constexpr):
    """WHOLE: the mask is true everywhere."""
    if WHOLE:
        return tl.load(place)
    else:
        return tl.load(place, mask=mask, other=0.0)


@triton.jit
def _store_pairs(
    b, c, pairs, token, index, group, groups, size, b_stride, c_stride,
    STATE: tl.constexpr, CHUNK: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    inside, place = tl.arange(0, CHUNK), tl.arange(0, STATE)
    is_place, place = (place < size)[None, :], (group * size + place)[None, :]
    some_b = tl.load(b + token[:, None] * b_stride + place, mask=is_place, other=0.0).to(COMPUTE)
    some_c = tl.load(c + token[:, None] * c_stride + place, mask=is_place, other=0.0).to(COMPUTE)
    product = tl.dot(some_b, tl.trans(some_c), input_precision=PRECISION)
    pairs += (index * groups + group).to(tl.int64) * (CHUNK * CHUNK)
    is_seen = inside[:, None] <= inside[None, :]
    tl.store(pairs + inside[:, None] * CHUNK + inside[None, :], tl.where(is_seen, product, 0.0))


@triton.jit
def _store_sums(time, decay, sums, token, is_token, index, head, heads, CHUNK: tl.constexpr):
    mask, is_token = (head < heads)[None, :] & is_token[:, None], is_token[:, None]
    head = head[None, :]
    one_time = tl.load(time + token[:, None] * heads + head, mask=mask, other=0.0)
    one_decay = tl.load(decay + token[:, None] * heads + head, mask=mask, other=0.0) * LOG2_E
    total = tl.cumsum(one_decay, 0)
    source = tl.where(is_token, total - tl.log2(tl.maximum(one_time, TINY)), float("inf"))
    held = sums + (index.to(tl.int64) * heads + head) * (3 * CHUNK) + tl.arange(0, CHUNK)[:, None]
    tl.store(held, total, mask=head < heads)
    tl.store(held + CHUNK, source, mask=head < heads)
    tl.store(held + 2 * CHUNK, tl.exp2(tl.sum(one_decay, 0)[None, :] - source), mask=head < heads)


@triton.jit
def _chunk_kernel(
    b, c, time, decay, query_starts, pairs, sums,
    num_rows, groups, heads, size, b_stride, c_stride,
    BLOCK: tl.constexpr, STATE: tl.constexpr, CHUNK: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: (groups, then blocks of heads; chunks). Tokens behind the row's end are its last one over again, with
    step sizes of nothing.

    pairs: [chunks, groups, CHUNK, CHUNK], what a later token (the second) reads of an earlier one.
    sums: [chunks, heads, 3, CHUNK]: running sums of decays as powers of 2; the same less the step size, which is a
    decay that comes before its token; what is left of a token at the chunk's end.
    """
    part, index = tl.program_id(0), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, CHUNK, EXTRA=1)
    start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    begin = start + (index - start // CHUNK - row) * CHUNK
    if begin >= end:
        return
    inside = tl.arange(0, CHUNK)
    token = tl.minimum(begin + inside, end - 1).to(tl.int64)
    if part < groups:
        _store_pairs(
            b, c, pairs, token, index, part, groups, size, b_stride, c_stride, STATE, CHUNK, COMPUTE, PRECISION
        )
    else:
        head = (part - groups) * BLOCK + tl.arange(0, BLOCK)
        _store_sums(time, decay, sums, token, begin + inside < end, index, head, heads, CHUNK)


@triton.jit
def _added_to(
    live, some_x, some_b, sums,
    CHUNK: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state [features, state] behind a chunk of x [CHUNK, features] and b [CHUNK, state]."""
    left = tl.load(sums + 2 * CHUNK + tl.arange(0, CHUNK))
    added = tl.trans(some_x).to(tl.float32) * left[None, :]
    return _left_product(added, some_b, live * tl.exp2(tl.load(sums + CHUNK - 1)), TERMS, COMPUTE, PRECISION)


@triton.jit
def _piece_kernel(
    x, b, sums, query_starts, work, faded,
    num_rows, piece, heads, dim, size, x_stride, b_stride,
    GROUP: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (heads, pieces but each row's last, tiles of features). What a piece makes of a state of zero."""
    head, index = tl.program_id(0), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, piece, EXTRA=0)
    start = tl.load(query_starts + row)
    local = index - start // piece
    if (local + 1) * piece >= tl.load(query_starts + row + 1) - start:
        return
    feature, place = tl.program_id(2) * VALUES + tl.arange(0, VALUES), tl.arange(0, STATE)
    is_feature, is_place = feature < dim, place < size
    inside = tl.arange(0, CHUNK)
    begin = (start + local * piece).to(tl.int64)
    x += begin * x_stride + head * dim
    b += begin * b_stride + (head // GROUP) * size
    sums += ((start // CHUNK + row + local * (piece // CHUNK)).to(tl.int64) * heads + head) * (3 * CHUNK)
    live = tl.zeros((VALUES, STATE), tl.float32)
    fade = 0.0
    of_x = inside[:, None] * x_stride + feature[None, :]
    # x is asked for a chunk ahead here: as it isn't a product's factor as it is, the compiler would ask too late.
    next_x = _load(x + of_x, is_feature[None, :], WHOLE)
    for offset in tl.range(0, piece, CHUNK, num_stages=STAGES):  # no chunk here reaches behind the row's end
        some_x = next_x
        ahead = x + tl.minimum(offset + CHUNK, piece - CHUNK) * x_stride
        next_x = _load(ahead + of_x, is_feature[None, :], WHOLE)
        of_b = (offset + inside)[:, None] * b_stride + place[None, :]
        some_b = _load(b + of_b, is_place[None, :], WHOLE).to(COMPUTE)
        live = _added_to(live, some_x, some_b, sums, CHUNK, TERMS, COMPUTE, PRECISION)
        fade += tl.load(sums + CHUNK - 1)
        sums += heads * (3 * CHUNK)
    at = (2 * (start // piece) + local).to(tl.int64) * heads + head
    held = work + at * dim * size + feature[:, None] * size + place[None, :]
    tl.store(held, live, mask=is_feature[:, None] & is_place[None, :])
    tl.store(faded + at, fade)


@triton.jit
def _added(work, faded, place, at, is_there, count):
    """What a piece adds, and what it leaves of the state before it: nothing and all, if it isn't there."""
    added = tl.load(work + at * count + place, mask=place < tl.where(is_there, count, 0), other=0.0)
    return added, tl.exp2(tl.load(faded + at, mask=is_there, other=0.0))


@triton.jit
def _chain_kernel(
    state, work, faded, slots, query_starts,
    num_rows, piece, heads, count, state_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: (blocks of a head's state, heads, places of rows' first pieces). `work` becomes the state before each
    piece. Four pieces are read before the first of them is overwritten: their latencies pass together."""
    index, head = tl.program_id(2), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, piece, EXTRA=0)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    if index != start // piece or length <= piece:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    live = tl.load(state + tl.load(slots + row) * state_stride + head * count + place, mask=mask).to(tl.float32)
    num_before = (length - 1) // piece  # pieces that another one follows
    at = 2 * (start // piece).to(tl.int64) * heads + head
    for local in range(0, num_before, 4):
        is_second, is_third, is_fourth = local + 1 < num_before, local + 2 < num_before, local + 3 < num_before
        second, third, fourth = at + heads, at + 2 * heads, at + 3 * heads
        added, kept = _added(work, faded, place, at, local < num_before, count)
        added_2, kept_2 = _added(work, faded, place, second, is_second, count)
        added_3, kept_3 = _added(work, faded, place, third, is_third, count)
        added_4, kept_4 = _added(work, faded, place, fourth, is_fourth, count)
        tl.store(work + at * count + place, live, mask=mask)
        live = live * kept + added
        tl.store(work + second * count + place, live, mask=place < tl.where(is_second, count, 0))
        live = live * kept_2 + added_2
        tl.store(work + third * count + place, live, mask=place < tl.where(is_third, count, 0))
        live = live * kept_3 + added_3
        tl.store(work + fourth * count + place, live, mask=place < tl.where(is_fourth, count, 0))
        live = live * kept_4 + added_4
        at += 4 * heads
    last = 2 * (start // piece).to(tl.int64) * heads + head + num_before * heads
    tl.store(work + last * count + place, live, mask=mask)


@triton.jit
def _mixed(
    live, some_x, some_c, pairs, sums, skip,
    CHUNK: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs [features, CHUNK] of a chunk, before which the state is `live`."""
    inside = tl.arange(0, CHUNK)
    total, source = tl.load(sums + inside), tl.load(sums + CHUNK + inside)
    # Pairs are 0 where the exponent is of a token that comes later.
    scores = pairs * tl.exp2(tl.minimum(total[None, :] - source[:, None], LARGE))
    scores += tl.where(inside[:, None] == inside[None, :], skip, 0.0)
    if TERMS == 1:
        # Rounded right here, it waits in half as many registers.
        scores = scores.to(tl.bfloat16).to(tl.float32)
    none = tl.zeros((live.shape[0], CHUNK), tl.float32)
    mixed = _left_product(live, tl.trans(some_c), none, TERMS, COMPUTE, PRECISION)
    mixed *= tl.exp2(tl.load(sums + inside))[None, :]
    return _right_product(tl.trans(some_x).to(COMPUTE), scores, mixed, TERMS, COMPUTE, PRECISION)


@triton.jit
def _walk(
    live, x, b, c, pairs, sums, out, skip, count, feature, place, is_feature, is_place,
    heads, dim, x_stride, b_stride, c_stride,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, TERMS: tl.constexpr, OUT_TERMS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A piece's chunks: -> the state behind it."""
    inside = tl.arange(0, CHUNK)
    for offset in tl.range(0, count, CHUNK, num_stages=STAGES):
        token = tl.minimum(offset + inside, count - 1)
        some_b = _load(b + token[:, None] * b_stride + place[None, :], is_place[None, :], WHOLE).to(COMPUTE)
        some_c = _load(c + token[:, None] * c_stride + place[None, :], is_place[None, :], WHOLE).to(COMPUTE)
        some_x = _load(x + token[:, None] * x_stride + feature[None, :], is_feature[None, :], WHOLE)
        some_pairs = tl.load(pairs + inside[:, None] * CHUNK + inside[None, :])
        mixed = _mixed(live, some_x, some_c, some_pairs, sums, skip, CHUNK, OUT_TERMS, COMPUTE, PRECISION)
        to = out + (offset + inside)[None, :] * (heads * dim) + feature[:, None]
        tl.store(to, mixed, mask=(offset + inside < count)[None, :] & is_feature[:, None])
        live = _added_to(live, some_x, some_b, sums, CHUNK, TERMS, COMPUTE, PRECISION)
        sums += heads * (3 * CHUNK)
        pairs += (heads // GROUP) * (CHUNK * CHUNK)
    return live


@triton.jit
def _scan_kernel(
    x, b, c, pairs, sums, skip, state, out, slots, query_starts, work,
    num_rows, piece, heads, dim, size, x_stride, b_stride, c_stride, state_stride,
    GROUP: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    TERMS: tl.constexpr, OUT_TERMS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (heads, pieces, tiles of features)."""
    head, index = tl.program_id(0), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, piece, EXTRA=1)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    local = index - start // piece - row
    if local * piece >= length:
        return
    feature, place = tl.program_id(2) * VALUES + tl.arange(0, VALUES), tl.arange(0, STATE)
    is_feature, is_place = feature < dim, place < size
    mask = is_feature[:, None] & is_place[None, :]
    inner = head * dim * size + feature[:, None] * size + place[None, :]
    if length <= piece:
        held = state + tl.load(slots + row) * state_stride + inner
        live = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    else:
        before = (2 * (start // piece) + local).to(tl.int64) * heads * dim * size
        live = tl.load(work + before + inner, mask=mask, other=0.0)
    begin = (start + local * piece).to(tl.int64)
    count = tl.minimum(length - local * piece, piece)
    x += begin * x_stride + head * dim
    b += begin * b_stride + (head // GROUP) * size
    c += begin * c_stride + (head // GROUP) * size
    out += (begin * heads + head) * dim
    chunk = (start // CHUNK + row + local * (piece // CHUNK)).to(tl.int64)
    sums += (chunk * heads + head) * (3 * CHUNK)
    pairs += (chunk * (heads // GROUP) + head // GROUP) * (CHUNK * CHUNK)
    skipped = tl.load(skip + head)
    if local * piece + piece >= length:
        live = _walk(
            live, x, b, c, pairs, sums, out, skipped, count, feature, place, is_feature, is_place,
            heads, dim, x_stride, b_stride, c_stride,
            GROUP, CHUNK, WHOLE, TERMS, OUT_TERMS, COMPUTE, PRECISION, STAGES,
        )  # fmt: skip
        # Asked again, or the addresses of the whole tile stay in registers all the way.
        feature += tl.load(query_starts + row) - start
        inner = head * dim * size + feature[:, None] * size + place[None, :]
        held = state + tl.load(slots + row) * state_stride + inner
        tl.store(held, live.to(state.dtype.element_ty), mask=(feature < dim)[:, None] & is_place[None, :])
    else:
        # The pass over pieces has worked out the state behind this one: here it's as good as outputs need.
        _walk(
            live, x, b, c, pairs, sums, out, skipped, count, feature, place, is_feature, is_place,
            heads, dim, x_stride, b_stride, c_stride,
            GROUP, CHUNK, WHOLE, OUT_TERMS, OUT_TERMS, COMPUTE, PRECISION, STAGES,
        )  # fmt: skip


# ---- single tokens ---------------------------------------------------------------------------


@triton.jit
def _step_kernel(
    x, b, c, time, decay, skip, state, out, slots, query_starts,
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
    one_x = tl.load(x + token * x_stride + head * dim + feature, mask=is_feature, other=0.0).to(tl.float32)
    one_b = tl.load(b + token * b_stride + (head // GROUP) * size + place, mask=is_place, other=0.0).to(tl.float32)
    one_c = tl.load(c + token * c_stride + (head // GROUP) * size + place, mask=is_place, other=0.0).to(tl.float32)
    added = one_x * tl.load(time + token * heads + head)
    live = live * tl.exp(tl.load(decay + token * heads + head)) + added[:, None] * one_b[None, :]
    mixed = tl.sum(live * one_c[None, :], 1) + tl.load(skip + head) * one_x
    tl.store(out + (token * heads + head) * dim + feature, mixed, mask=is_feature)
    tl.store(held, live.to(state.dtype.element_ty), mask=mask)


def launch_ssd(
    x: Tensor, b: Tensor, c: Tensor, *, time: Tensor, decay: Tensor, skip: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """As `ssd`."""
    num_tokens, heads, dim = x.shape
    out = torch.empty((num_tokens, heads, dim), dtype=torch.float32, device=x.device)
    if not num_tokens:
        return out
    size, num_context = b.shape[2], step.num_context_rows
    time, decay = time.contiguous(), decay.contiguous()
    for part in (x, b, c):
        assert part.stride(2) == 1 and part.stride(1) == part.shape[2]
    assert state[0].is_contiguous() and x.dtype == b.dtype == c.dtype
    assert time.dtype == decay.dtype == skip.dtype == torch.float32
    if num_context:
        _launch_prompts(x, b, c, time, decay, skip, state, out, step)
    if num_context < len(step.slots):
        grid(_step_kernel, -(-dim // STEP_VALUES), heads, len(step.slots) - num_context)(
            x, b, c, time, decay, skip, state, out, step.slots, step.query_starts,
            num_context, heads, dim, size, x.stride(0), b.stride(0), c.stride(0), state.stride(0),
            GROUP=heads // b.shape[1], STATE=max(16, power_of_2(size)), VALUES=STEP_VALUES, num_warps=4,
        )  # fmt: skip
    return out


def _launch_prompts(
    x: Tensor, b: Tensor, c: Tensor, time: Tensor, decay: Tensor, skip: Tensor, state: Tensor, out: Tensor,
    step: StateRows,
) -> None:  # fmt: skip
    """The context rows."""
    _, heads, dim = x.shape
    groups, size, starts = b.shape[1], b.shape[2], step.context_starts
    how, padded = tiling(x.dtype, size, room=shared_bytes(x.device)), max(16, power_of_2(size))
    values = max(16, min(how.max_tile // padded, 64, power_of_2(dim)))
    tiles, block = -(-dim // values), min(HEAD_BLOCK, power_of_2(heads))
    widest = max(x.stride(0), b.stride(0), c.stride(0), heads * dim)
    piece = piece_tokens(starts[-1], heads * tiles, chunk=how.chunk, widest=widest)
    num_rows, num_whole = step.num_context_rows, starts[-1] // piece
    num_chunks = starts[-1] // how.chunk + num_rows
    common = {
        "STATE": padded, "CHUNK": how.chunk, "PRECISION": how.precision, "num_warps": how.warps,
        # The interpreter can't multiply bfloat16.
        "COMPUTE": tl.bfloat16 if how.terms and x.is_cuda else tl.float32,
    }  # fmt: skip
    pairs = torch.empty((num_chunks, groups, how.chunk, how.chunk), dtype=torch.float32, device=x.device)
    sums = torch.empty((num_chunks, heads, 3, how.chunk), dtype=torch.float32, device=x.device)
    grid(_chunk_kernel, groups + -(-heads // block), num_chunks)(
        b, c, time, decay, step.query_starts, pairs, sums, num_rows, groups, heads, size,
        b.stride(0), c.stride(0), BLOCK=block, **common,
    )  # fmt: skip
    cut = (num_rows, piece, heads)
    common |= {"GROUP": heads // groups, "VALUES": values, "WHOLE": dim % values == 0 and size == padded}
    common |= {"TERMS": how.terms, "STAGES": how.stages}
    of_pieces, of_outputs = ({"maxnreg": most} for most in how.registers) if how.registers and x.is_cuda else ({}, {})
    work = skip  # nothing is read of it where each row is one piece
    if max(end - start for start, end in pairwise(starts)) > piece:
        # A row of several pieces takes up to twice as many places as it has whole ones.
        work = torch.empty((2 * num_whole, heads, dim, size), dtype=torch.float32, device=x.device)
        faded = torch.empty((2 * num_whole, heads), dtype=torch.float32, device=x.device)
        grid(_piece_kernel, heads, num_whole, tiles)(
            x, b, sums, step.query_starts, work, faded, *cut, dim, size, x.stride(0), b.stride(0),
            **common, **of_pieces,
        )  # fmt: skip
        grid(_chain_kernel, -(-dim * size // CHAIN_BLOCK), heads, num_whole)(
            state, work, faded, step.slots, step.query_starts, *cut, dim * size, state.stride(0),
            BLOCK=CHAIN_BLOCK, num_warps=4,
        )  # fmt: skip
    grid(_scan_kernel, heads, num_whole + num_rows, tiles)(
        x, b, c, pairs, sums, skip, state, out, step.slots, step.query_starts, work, *cut, dim, size,
        x.stride(0), b.stride(0), c.stride(0), state.stride(0), OUT_TERMS=how.out_terms, **common, **of_outputs,
    )  # fmt: skip


def piece_tokens(num_tokens: int, num_tiles: int, *, chunk: int, widest: int) -> int:
    """Tokens of a piece, in whole chunks.

    Args:
        num_tiles: of states, that go their own ways.
        widest: the largest stride of a token; places within a piece are 32-bit numbers.
    """
    num_pieces = max(1, PROGRAMS // num_tiles)
    wanted = -(-num_tokens // (num_pieces * chunk))
    return chunk * max(1, min(wanted, MAX_PLACE // (widest * chunk)))
