"""Mamba-2's state space in Triton: prompts in pieces that go on at the same time, and single tokens.

A program walks the chunks of one piece of a row with a head's state in registers (Dao and Gu 2024). Where rows have
several pieces, a pass before it works out what each piece adds to a state of zero, and another one makes of that the
state before each piece. Pieces are as long as leaves enough of them for a GPU: what goes through memory is one state a
piece, not one a chunk.

In a bfloat16 model x, b and c are exact factors. What is in float32, such as decays times step sizes, becomes the sum
of two bfloat16 numbers, which keeps 16 of its bits: the products run at the tensor cores' full rate and lose nothing
beside the rounding of x, b and c themselves. States are summed in float32, and rounded where outputs come of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels.port import StateRows

STEP_VALUES = 32
"""Features of a state tile where rows have one token each."""
MIN_PROGRAMS = 512
"""Pieces get no shorter than leaves about as many programs; the workspace holds at most four tiles of a state each."""
MAX_PLACE = (1 << 31) - 1
CHAIN_BLOCK = 1024
"""Numbers of a state that a program of the chain over pieces carries."""

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-37)
"""The least step size whose logarithm is taken."""


class Tiling(NamedTuple):
    """How prompts are cut."""

    chunk: int
    """Tokens of a chunk."""
    max_tile: int
    """Numbers of a state tile: a head's state has one or more, of some of its features each."""
    warps: int
    stages: int
    terms: int
    """bfloat16 numbers that one in float32 is split into; 0 multiplies in float32."""
    held_terms: int
    """The same of a state, where outputs come of it."""
    precision: str
    """Of products in float32."""
    piece_registers: int | None = None
    """The most a thread has where pieces are worked out: with 128, four programs run on a multiprocessor."""


HALVES = Tiling(64, 64 * 128, warps=4, stages=2, terms=2, held_terms=1, precision="ieee", piece_registers=128)
"""Of bfloat16, for states of 128 and tiles of 64 features."""
WIDENED = Tiling(16, 32 * 128, warps=8, stages=1, terms=0, held_terms=0, precision="tf32x3")
TILINGS = {
    torch.bfloat16: WIDENED,
    torch.float16: WIDENED,
    torch.float32: Tiling(16, 16 * 128, warps=8, stages=1, terms=0, held_terms=0, precision="ieee"),
}
"""By the model's type. With larger tiles, or fewer warps, registers spill to memory."""


def tiling(x: Tensor, size: int) -> Tiling:
    """For x [tokens, heads, dim] and states of this size.

    Products of bfloat16 numbers are for what was held against float64 on a card: compiled by Triton 3.6 for states of
    40 and 24 features, tiles of 64 x 32, they left wrong states behind chunks of more than 32 tokens.
    """
    dim = x.shape[2]
    is_known = size == 128 and dim % 16 == 0 and dim >= 64
    return HALVES if x.dtype == torch.bfloat16 and is_known else TILINGS[x.dtype]


# ---- prompts ---------------------------------------------------------------------------------


@triton.jit
def _row_of(index, query_starts, num_rows, num_rounds, PIECE, EXTRA: tl.constexpr):
    """The last row whose pieces begin at or before this place: a row's first is at start // PIECE + EXTRA * row."""
    low, high = 0, num_rows
    for _ in range(num_rounds):
        middle = (low + high) // 2
        is_before = tl.load(query_starts + middle) // PIECE + EXTRA * middle <= index
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low


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
def _piece_kernel(
    x, b, time, decay, query_starts, work, faded,
    num_rows, num_rounds, piece, heads, dim, size, x_stride, b_stride,
    GROUP: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    TERMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (heads, pieces but each row's last, tiles of features). What a piece makes of a state of zero."""
    head, index = tl.program_id(0), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, num_rounds, piece, EXTRA=0)
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
    time += begin * heads + head
    decay += begin * heads + head
    live = tl.zeros((STATE, VALUES), tl.float32)
    fade = 0.0
    for _ in tl.range(0, piece, CHUNK, num_stages=STAGES):  # no chunk here reaches behind the row's end
        some_b = tl.load(b + inside[:, None] * b_stride + place[None, :], mask=is_place[None, :], other=0.0)
        some_x = tl.load(x + inside[:, None] * x_stride + feature[None, :], mask=is_feature[None, :], other=0.0)
        total = tl.cumsum(tl.load(decay + inside * heads), 0)
        last = tl.sum(tl.where(inside == CHUNK - 1, total, 0.0), 0)
        left = some_x.to(tl.float32) * (tl.exp(last - total) * tl.load(time + inside * heads))[:, None]
        live = _right_product(tl.trans(some_b.to(COMPUTE)), left, live * tl.exp(last), TERMS, COMPUTE, PRECISION)
        fade += last
        x, b = x + CHUNK * x_stride, b + CHUNK * b_stride
        time, decay = time + CHUNK * heads, decay + CHUNK * heads
    at = (2 * (start // piece) + local).to(tl.int64) * heads + head
    held = work + at * dim * size + feature[None, :] * size + place[:, None]
    tl.store(held, live, mask=is_place[:, None] & is_feature[None, :])
    tl.store(faded + at, fade)


@triton.jit
def _added(work, faded, place, at, is_there, count):
    """What a piece adds, and what it leaves of the state before it: nothing and all, if it isn't there."""
    added = tl.load(work + at * count + place, mask=place < tl.where(is_there, count, 0), other=0.0)
    return added, tl.exp(tl.load(faded + at, mask=is_there, other=0.0))


@triton.jit
def _chain_kernel(
    state, work, faded, slots, query_starts,
    num_rows, num_rounds, piece, heads, count, state_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: (blocks of a head's state, heads, places of rows' first pieces). `work` becomes the state before each
    piece. Four pieces are read before the first of them is overwritten: their latencies pass together."""
    index, head = tl.program_id(2), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, num_rounds, piece, EXTRA=0)
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
def _scan_kernel(
    x, b, c, time, decay, skip, state, out, slots, query_starts, work,
    num_rows, num_rounds, piece, heads, dim, size, x_stride, b_stride, c_stride, state_stride,
    GROUP: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr,
    TERMS: tl.constexpr, HELD_TERMS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: (heads, pieces, tiles of features). What does not depend on the chunk stays in registers, so little is
    worked out before the loop."""
    head, index = tl.program_id(0), tl.program_id(1)
    row = _row_of(index, query_starts, num_rows, num_rounds, piece, EXTRA=1)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    local = index - start // piece - row
    if local * piece >= length:
        return
    feature, place = tl.program_id(2) * VALUES + tl.arange(0, VALUES), tl.arange(0, STATE)
    is_feature, is_place = feature < dim, place < size
    mask = is_place[:, None] & is_feature[None, :]
    inner = head * dim * size + feature[None, :] * size + place[:, None]
    if length <= piece:
        live = tl.load(state + tl.load(slots + row) * state_stride + inner, mask=mask, other=0.0).to(tl.float32)
    else:
        before = (2 * (start // piece) + local).to(tl.int64) * heads * dim * size
        live = tl.load(work + before + inner, mask=mask, other=0.0)
    begin = (start + local * piece).to(tl.int64)
    count = tl.minimum(length - local * piece, piece)
    x += begin * x_stride + head * dim
    b += begin * b_stride + (head // GROUP) * size
    c += begin * c_stride + (head // GROUP) * size
    first = begin * heads + head
    time, decay, out = time + first, decay + first, out + first * dim
    inside = tl.arange(0, CHUNK)
    is_seen = inside[:, None] >= inside[None, :]
    for offset in tl.range(0, count, CHUNK, num_stages=STAGES):
        token = offset + inside
        is_token = token < count
        both, of_x = is_token[:, None] & is_place[None, :], is_token[:, None] & is_feature[None, :]
        some_b = tl.load(b + token[:, None] * b_stride + place[None, :], mask=both, other=0.0).to(COMPUTE)
        some_c = tl.load(c + token[:, None] * c_stride + place[None, :], mask=both, other=0.0).to(COMPUTE)
        some_x = tl.load(x + token[:, None] * x_stride + feature[None, :], mask=of_x, other=0.0)
        # Tokens behind the row's end decay nothing and add nothing. A step size is a decay that comes before its token.
        total = tl.cumsum(tl.load(decay + token * heads, mask=is_token, other=0.0) * LOG2_E, 0)
        last = tl.sum(tl.where(inside == CHUNK - 1, total, 0.0), 0)
        source = total - tl.log2(tl.maximum(tl.load(time + token * heads, mask=is_token, other=0.0), TINY))
        none = tl.zeros((CHUNK, VALUES), tl.float32)
        mixed = _right_product(some_c, live, none, HELD_TERMS, COMPUTE, PRECISION) * tl.exp2(total)[:, None]
        scores = tl.dot(some_c, tl.trans(some_b), input_precision=PRECISION)
        scores *= tl.exp2(tl.where(is_seen, total[:, None] - source[None, :], float("-inf")))
        scores += tl.where(inside[:, None] == inside[None, :], tl.load(skip + head), 0.0)
        mixed = _left_product(scores, some_x.to(COMPUTE), mixed, TERMS, COMPUTE, PRECISION)
        tl.store(out + token[:, None] * (heads * dim) + feature[None, :], mixed, mask=of_x)
        left = some_x.to(tl.float32) * tl.exp2(last - source)[:, None]
        live = _right_product(tl.trans(some_b), left, live * tl.exp2(last), TERMS, COMPUTE, PRECISION)
    if local * piece + piece >= length:
        # Asked again, or the addresses of the whole tile stay in registers all the way.
        feature += tl.load(query_starts + row) - start
        inner = head * dim * size + feature[None, :] * size + place[:, None]
        held = state + tl.load(slots + row) * state_stride + inner
        tl.store(held, live.to(state.dtype.element_ty), mask=is_place[:, None] & (feature < dim)[None, :])


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
    size, num_rows = b.shape[2], step.num_context_rows
    how = tiling(x, size)
    padded = max(16, power_of_2(size))
    values = max(16, min(how.max_tile // padded, 64, power_of_2(dim)))
    tiles = -(-dim // values)
    starts = step.context_starts
    widest = max(x.stride(0), b.stride(0), c.stride(0), heads * dim)
    piece = piece_tokens(starts[-1], heads * tiles, chunk=how.chunk, widest=widest)
    num_whole = starts[-1] // piece
    rounds = (num_rows - 1).bit_length()
    options = {
        "GROUP": heads // b.shape[1], "STATE": padded, "VALUES": values, "CHUNK": how.chunk,
        "TERMS": how.terms, "PRECISION": how.precision, "STAGES": how.stages, "num_warps": how.warps,
        # The interpreter can't multiply bfloat16.
        "COMPUTE": tl.bfloat16 if how.terms and x.is_cuda else tl.float32,
    }  # fmt: skip
    cut = (num_rows, rounds, piece, heads)
    work = skip  # nothing is read of it where each row is one piece
    if max(end - start for start, end in pairwise(starts)) > piece:
        # A row of several pieces takes up to twice as many places as it has whole ones.
        work = torch.empty((2 * num_whole, heads, dim, size), dtype=torch.float32, device=x.device)
        faded = torch.empty((2 * num_whole, heads), dtype=torch.float32, device=x.device)
        registers = how.piece_registers if x.is_cuda else None
        grid(_piece_kernel, heads, num_whole, tiles)(
            x, b, time, decay, step.query_starts, work, faded, *cut, dim, size, x.stride(0), b.stride(0),
            **options, **({"maxnreg": registers} if registers else {}),
        )  # fmt: skip
        grid(_chain_kernel, -(-dim * size // CHAIN_BLOCK), heads, num_whole)(
            state, work, faded, step.slots, step.query_starts, *cut, dim * size, state.stride(0),
            BLOCK=CHAIN_BLOCK, num_warps=4,
        )  # fmt: skip
    grid(_scan_kernel, heads, num_whole + num_rows, tiles)(
        x, b, c, time, decay, skip, state, out, step.slots, step.query_starts, work, *cut, dim, size,
        x.stride(0), b.stride(0), c.stride(0), state.stride(0), HELD_TERMS=how.held_terms, **options,
    )  # fmt: skip


def piece_tokens(num_tokens: int, num_tiles: int, *, chunk: int, widest: int) -> int:
    """Tokens of a piece: a power of two of chunks.

    Args:
        num_tiles: of states, that go their own ways.
        widest: the largest stride of a token; places within a piece are 32-bit numbers.
    """
    most = min(num_tokens * num_tiles // MIN_PROGRAMS, MAX_PLACE // widest) // chunk
    return chunk << max(most.bit_length() - 1, 0)
