"""Contexts of rows with one token each, cut in parts: how they are dealt among programs, and how parts are merged.

How much there is to do only the device knows. Each program works out from all rows' lengths which row and part are its
own, so parts are even however lengths differ, and the grid depends on the number of rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels.port import PackedRows

PART_ENDS = 4
"""Numbers behind the values of a part: maximum, sum, two that keep the next one aligned."""
PROCESSORS = 132
"""Of a GPU, which hold a program each."""
MIN_PART, MAX_PARTS = 128, 64
"""Fewest tokens of a part; most parts of a row."""
FEW_ROWS, MAX_DEALT_ROWS = 256, 2048
"""Rows that a program looks at; with more than the second, none is cut."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """How contexts are cut, and where parts are kept. Shared by all layers of a group, which run one after another."""

    num_parts: int
    """That all rows' contexts together are cut in, but that each row has one at least; 0: no row is cut."""
    partial: Tensor  # [rows + num_parts, heads, rank + PART_ENDS] float32
    parts: Tensor  # [rows, 2] int32: the first of a row's parts, and their number


def new_plan(
    num_rows: int, num_heads: int, rank: int, *, head_tiles: int, max_kv: int, device: torch.device
) -> LatentPlan:
    """head_tiles: programs of a row that isn't cut. max_kv: an upper bound of what a query reads."""
    is_cut = max_kv > MIN_PART and num_rows <= MAX_DEALT_ROWS
    num_parts = num_parts_of(num_rows, head_tiles) if is_cut else 0
    rows = num_rows if is_cut else 0
    return LatentPlan(
        num_parts,
        torch.empty((rows + num_parts, num_heads, rank + PART_ENDS), dtype=torch.float32, device=device),
        torch.empty((rows, 2), dtype=torch.int32, device=device),
    )


def num_parts_of(num_rows: int, head_tiles: int) -> int:
    """Chosen for rows of one length, with some tokens more in a part: rows a little longer aren't cut once more."""
    programs = num_rows * head_tiles

    def cost(parts: int) -> float:
        """In times of a whole row of 4,096 tokens, of which a round's beginning and end take 0.04 (measured)."""
        rounds = -(-programs * parts // PROCESSORS)
        return rounds / parts + (0.04 * rounds + programs * parts / 2500 if parts > 1 else 0.0)

    parts = min(range(1, MAX_PARTS + 1), key=cost)
    if parts == 1:
        # With many rounds whatever is long evens out, and only rows of several times the mean are cut.
        return max(1, int(num_rows / max(1.125, programs / (2 * PROCESSORS))))
    # Rows of other lengths have half a part more each: with them too no round begins for a few parts.
    room = -(-programs * parts // PROCESSORS) * PROCESSORS // head_tiles - num_rows // 2
    return min(max(room, num_rows * (parts - 1) + 1), num_rows * parts)


def deal_options(plan: LatentPlan | None, num_rows: int) -> dict[str, int]:
    """What a kernel takes that deals rows; ROWS is 0 where none is cut."""
    rows = FEW_ROWS if num_rows <= FEW_ROWS else MAX_DEALT_ROWS
    return {"ROWS": 0 if plan is None or not plan.num_parts else rows, "MIN_PART": MIN_PART, "MAX_PARTS": MAX_PARTS}


@triton.jit
def span_of(kv_len, window, TOP: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Tokens that are read for the last one of each row, from a tile's first one on."""
    if TOP > 0:
        kv_len = tl.minimum(kv_len, TOP)
    elif HAS_WINDOW:
        if not HAS_SINKS:
            kv_len -= tl.maximum(kv_len - window, 0) // TILE * TILE
    return kv_len


@triton.jit
def part_size(span, part, TILE: tl.constexpr, MAX_PARTS: tl.constexpr):
    """Tokens of a row's parts, which are alike. part: of all rows, at most. -> whole tiles, at least one"""
    num_parts = tl.cdiv(span, tl.maximum(tl.cdiv(tl.maximum(part, tl.cdiv(span, MAX_PARTS)), TILE) * TILE, TILE))
    return tl.maximum(tl.cdiv(tl.cdiv(span, tl.maximum(num_parts, 1)), TILE) * TILE, TILE)


@triton.jit
def deal(
    kv_lens,
    num_rows,
    num_parts,
    window,
    program,
    ROWS: tl.constexpr,
    MIN_PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Each program finds its row and part from all lengths: even parts of all tokens, so that no long row keeps the
    others waiting and no row that is as long as the others is cut. -> (row, its first part, tokens of a part)"""
    rows = tl.arange(0, ROWS)
    there = rows < num_rows
    spans = span_of(tl.load(kv_lens + rows, mask=there, other=0), window, TOP, TILE, HAS_WINDOW, HAS_SINKS)
    part = tl.maximum(tl.cdiv(tl.sum(spans.to(tl.int64), 0), num_parts).to(tl.int32), MIN_PART)
    counts = tl.maximum(tl.cdiv(spans, part_size(spans, part, TILE, MAX_PARTS)), 1)
    ends = tl.cumsum(tl.where(there, counts, 0), 0)
    before = there & (ends <= program)
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0), part


@triton.jit(do_not_specialize=["first_row", "first_token"])
def _merge_kernel(
    partial,
    parts,
    out,
    query_starts,
    v_scale,
    out_stride,
    first_row,
    first_token,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (heads, rows). What the parts of a row's context gave, as one; nothing where it was one part."""
    wait_for_predecessor(CHAINED)
    head, row = tl.program_id(0), tl.program_id(1)
    first, num_parts = tl.load(parts + 2 * row), tl.load(parts + 2 * row + 1)
    if num_parts <= 1:
        return
    place = partial + (first * NUM_HEADS + head).to(tl.int64) * PART
    every, dims = tl.arange(0, MAX_PARTS), tl.arange(0, RANK_BLOCK)
    peaks = tl.load(place + every * (NUM_HEADS * PART) + RANK, mask=every < num_parts, other=float("-inf"))
    highest = tl.maximum(tl.max(peaks, 0), -1e30)
    shares = tl.load(place + every * (NUM_HEADS * PART) + RANK + 1, mask=every < num_parts, other=0.0)
    total = tl.sum(shares * tl.exp2(peaks - highest), 0)
    acc = tl.zeros((RANK_BLOCK,), tl.float32)
    for base in range(0, num_parts, AT_ONCE):
        at = base + tl.arange(0, AT_ONCE)
        known = at < num_parts
        mine = place + at * (NUM_HEADS * PART)
        weights = tl.exp2(tl.load(mine + RANK, mask=known, other=float("-inf")) - highest)
        inside = known[:, None] & (dims < RANK)[None, :]
        acc += tl.sum(tl.load(mine[:, None] + dims[None, :], mask=inside, other=0.0) * weights[:, None], 0)
    result = (acc * (v_scale / tl.where(total > 0.0, total, 1.0))).to(out.dtype.element_ty)
    token = tl.load(query_starts + first_row + row).to(tl.int64) - first_token
    tl.store(out + token * out_stride + head * RANK + dims, result, mask=dims < RANK)


def launch_merge(
    plan: LatentPlan, out: Tensor, step: PackedRows, *, rows: tuple[int, int], first_token: int, v_scale: float
) -> None:
    """out: [some tokens, heads, rank], which begins with the step's token first_token. Rows of one part have theirs."""
    num_heads, rank = out.shape[1:]
    grid(_merge_kernel, num_heads, rows[1] - rows[0])(
        plan.partial, plan.parts, out, step.query_starts, v_scale, out.stride(0), rows[0], first_token,
        NUM_HEADS=num_heads, RANK=rank, RANK_BLOCK=power_of_2(rank), PART=rank + PART_ENDS, MAX_PARTS=MAX_PARTS,
        AT_ONCE=16, **chain_options(out, 4),
    )  # fmt: skip
