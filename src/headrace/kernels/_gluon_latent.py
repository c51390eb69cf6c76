"""Latent attention of rows with one token each on Hopper, as `_triton_latent.py` has it, in Gluon.

What Triton's pipeliner can't be told is said here: a tile of 64 vectors is copied while the one before is worked on, in
two buffers that with the queries fill a processor's shared memory; a tile's scores go to the tensor cores right behind
the values of the tile before, so that only the softmax lies between them. The scores of 64 heads are shared out between
two groups of warps, half of the tile's vectors each; of the values each group has half of the features.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from headrace.kernels._triton_chain import chain_options, grid
from headrace.kernels._triton_decode import LOG2_E
from headrace.kernels._triton_latent_parts import PART_ENDS, LatentPlan, deal_options
from headrace.kernels.port import PackedRows

HEADS, TILE, WARPS = 64, 64, 8

# Triton 3.9 has another name for it.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _part_size(span, part, TILE: gl.constexpr, MAX_PARTS: gl.constexpr):
    """As `part_size` of `_triton_latent_parts.py`."""
    most = gl.maximum(gl.cdiv(gl.maximum(part, gl.cdiv(span, MAX_PARTS)), TILE) * TILE, TILE)
    num_parts = gl.maximum(gl.cdiv(span, most), 1)
    return gl.maximum(gl.cdiv(gl.cdiv(span, num_parts), TILE) * TILE, TILE)


@gluon.jit
def _deal(
    kv_lens,
    num_rows,
    num_parts,
    program,
    ROWS: gl.constexpr,
    MIN_PART: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    TILE: gl.constexpr,
    LINE: gl.constexpr,
):
    """As `deal` of `_triton_latent_parts.py`."""
    rows = gl.arange(0, ROWS, LINE)
    there = rows < num_rows
    spans = gl.load(kv_lens + rows, mask=there, other=0)
    part = gl.maximum(gl.cdiv(gl.sum(spans.to(gl.int64), 0), num_parts).to(gl.int32), MIN_PART)
    counts = gl.maximum(gl.cdiv(spans, _part_size(spans, part, TILE, MAX_PARTS)), 1)
    ends = gl.associative_scan(gl.where(there, counts, 0), 0, _add)
    before = there & (ends <= program)
    return gl.sum(before.to(gl.int32), 0), gl.max(gl.where(before, ends, 0), 0), part


@gluon.jit
def _fetch(
    cache,
    vectors,
    turned,
    block,
    at,
    block_stride,
    BLOCK_SIZE: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    FETCHED: gl.constexpr,
):
    """Begin to copy a tile to shared memory. Its caller commits."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, FETCHED)
    place = gl.expand_dims(cache + block.to(gl.int64) * block_stride + at % BLOCK_SIZE * (RANK + ROPE), 1)
    _copy(vectors, place + gl.expand_dims(gl.arange(0, RANK, COLUMNS), 0))
    _copy(turned, place + (RANK + gl.expand_dims(gl.arange(0, ROPE, COLUMNS), 0)))


@gluon.jit
def _scores(query, query_turned, vectors, turned, zero):
    """Begin a tile's scores: two products, one after the other. -> their sum, to wait for"""
    scores = warpgroup_mma(query, vectors.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(query_turned, turned.permute((1, 0)), scores, is_async=True)


@gluon.jit(do_not_specialize=["first_row", "first_token", "num_rows", "num_parts", "table_stride"])
def _latent_rows_kernel(
    q,
    turned_q,
    cache,
    out,
    tables,
    kv_lens,
    query_starts,
    partial,
    parts,
    scale,
    q_stride,
    turned_stride,
    out_stride,
    block_stride,
    table_stride,
    first_row,
    first_token,
    num_rows,
    num_parts,
    NUM_HEADS: gl.constexpr,
    NOPE: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    TILE: gl.constexpr,
    ROWS: gl.constexpr,
    MIN_PART: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    PART: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """Programs: (parts of HEADS heads, rows, or parts of rows where ROWS > 0)."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
    FETCHED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Of each head two numbers, one of each group of warps, in one thread. [HEADS, 2]
    BOTH: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[HEADS, 2],
    )
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_HEAD: gl.constexpr = gl.SliceLayout(1, VALUES)
    kind: gl.constexpr = q.dtype.element_ty

    head_tile, row = gl.program_id(0), gl.program_id(1)
    mine, first_part, part = row, row, 0
    if ROWS > 0:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        row, first_part, part = _deal(
            kv_lens + first_row, num_rows, num_parts, mine, ROWS, MIN_PART, MAX_PARTS, TILE, LINE
        )
        if row >= num_rows:
            return
    length = gl.load(kv_lens + first_row + row)
    begin, end, row_parts = 0, length, 1
    if ROWS > 0:
        part = _part_size(length, part, TILE, MAX_PARTS)
        row_parts = gl.maximum(gl.cdiv(length, part), 1)
        if (mine == first_part) & (head_tile == 0):
            gl.store(parts + 2 * row, first_part)
            gl.store(parts + 2 * row + 1, row_parts)
        begin = (mine - first_part) * part
        end = gl.minimum(begin + part, length)
    limit = gl.maximum(end - 1, 0)
    table = tables + (first_row + row).to(gl.int64) * table_stride

    # Places are known a tile before they are copied from; behind the last token it is copied again.
    vectors = gl.allocate_shared_memory(kind, [2, TILE, RANK], SHARED)
    turned = gl.allocate_shared_memory(kind, [2, TILE, ROPE], SHARED)
    offsets = gl.arange(0, TILE, gl.SliceLayout(1, FETCHED))
    at = gl.minimum(begin + offsets, limit)
    block = gl.load(table + at // BLOCK_SIZE)
    next_at = gl.minimum(begin + TILE + offsets, limit)
    next_block = gl.load(table + next_at // BLOCK_SIZE)
    _fetch(cache, vectors.index(0), turned.index(0), block, at, block_stride, BLOCK_SIZE, RANK, ROPE, FETCHED)
    async_copy.commit_group()
    if begin + TILE < end:
        _fetch(
            cache, vectors.index(1), turned.index(1), next_block, next_at, block_stride, BLOCK_SIZE, RANK, ROPE, FETCHED
        )
    async_copy.commit_group()
    at = gl.minimum(begin + 2 * TILE + offsets, limit)
    block = gl.load(table + at // BLOCK_SIZE)

    packed = gl.load(query_starts + first_row + row).to(gl.int64)
    heads = gl.expand_dims(head_tile * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE)), 1)
    dims = gl.expand_dims(gl.arange(0, RANK, gl.SliceLayout(0, WIDE)), 0)
    query = gl.allocate_shared_memory(
        kind, [HEADS, RANK], SHARED, gl.load(q + (packed - first_token) * q_stride + heads * RANK + dims)
    )
    turned_heads = gl.expand_dims(head_tile * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, FETCHED)), 1)
    turns = gl.expand_dims(gl.arange(0, ROPE, gl.SliceLayout(0, FETCHED)), 0)
    at_turned = turned_q + packed * turned_stride + NOPE + turned_heads * (NOPE + ROPE)
    query_turned = gl.allocate_shared_memory(kind, [HEADS, ROPE], SHARED, gl.load(at_turned + turns))
    passed = gl.allocate_shared_memory(kind, [HEADS, TILE], SHARED)
    fence_async_shared()

    zero = gl.full([HEADS, TILE], 0.0, gl.float32, SCORES)
    highest = gl.full([HEADS], float("-inf"), gl.float32, HEAD)
    totals = gl.full([HEADS, TILE], 0.0, gl.float32, SCORES)
    acc = gl.full([HEADS, RANK], 0.0, gl.float32, VALUES)
    async_copy.wait_group(1)
    fence_async_shared()  # products don't see copies of the ordinary way without it
    ahead = _scores(query, query_turned, vectors.index(0), turned.index(0), zero)
    index = 0
    for start in range(begin, end, TILE):
        scores = warpgroup_mma_wait(0, deps=[ahead])
        if start + TILE > end:
            seen = start + gl.arange(0, TILE, gl.SliceLayout(0, SCORES)) < end
            scores = gl.where(gl.expand_dims(seen, 0), scores, float("-inf"))
        peaks = gl.max(gl.reshape(scores, [HEADS, 2, TILE // 2]), 2)
        peak = gl.convert_layout(gl.max(gl.convert_layout(peaks, BOTH), 1), HEAD)
        new_highest = gl.maximum(highest, peak * scale)
        fade = gl.exp2(highest - new_highest)
        weights = gl.exp2(scores * scale - gl.expand_dims(new_highest, 1))
        totals = totals * gl.expand_dims(fade, 1) + weights
        highest = new_highest
        passed.store(weights.to(kind))
        mixed = passed.load(gl.DotOperandLayout(0, VALUES, 2))
        acc = acc * gl.expand_dims(gl.convert_layout(fade, OUT_HEAD), 1)
        mixing = warpgroup_mma(mixed, vectors.index(index), acc, is_async=True)
        # Behind the last tile the scores are of what was there before, and nobody reads them.
        async_copy.wait_group(0)
        fence_async_shared()
        ahead = _scores(query, query_turned, vectors.index(1 - index), turned.index(1 - index), zero)
        acc, mixed = warpgroup_mma_wait(2, deps=[mixing, mixed])
        if start + 2 * TILE < end:
            _fetch(
                cache, vectors.index(index), turned.index(index), block, at, block_stride,
                BLOCK_SIZE, RANK, ROPE, FETCHED,
            )  # fmt: skip
            async_copy.commit_group()
            at = gl.minimum(start + 3 * TILE + offsets, limit)
            block = gl.load(table + at // BLOCK_SIZE)
        index = 1 - index
    warpgroup_mma_wait(0, deps=[ahead])

    total = gl.convert_layout(gl.sum(totals, 1), OUT_HEAD)
    if ROWS > 0:
        if row_parts > 1:
            out_heads = head_tile * HEADS + gl.arange(0, HEADS, OUT_HEAD)
            place = partial + (mine * NUM_HEADS + out_heads).to(gl.int64) * PART
            out_dims = gl.arange(0, RANK, gl.SliceLayout(0, VALUES))
            gl.store(gl.expand_dims(place, 1) + gl.expand_dims(out_dims, 0), acc)
            gl.store(place + RANK, gl.convert_layout(highest, OUT_HEAD))
            gl.store(place + RANK + 1, total)
            return
    acc = acc * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 1)
    result = gl.convert_layout(acc.to(out.dtype.element_ty), WIDE)
    gl.store(out + (packed - first_token) * out_stride + heads * RANK + dims, result)


def launch_latent_rows(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    out: Tensor,
    scale: float,
    rows: tuple[int, int],
    first_token: int,
    plan: LatentPlan,
) -> None:
    """As `launch_latent`: rows of one token that see all, a cache of q's 16-bit type, heads in 64s, rank 512, 64 turned
    features. Parts aren't merged."""
    num_heads, rank = q.shape[1:]
    rope_dim, num_rows = cache.shape[2] - rank, rows[1] - rows[0]
    grid(_latent_rows_kernel, num_heads // HEADS, num_rows + plan.num_parts)(
        q, turned, cache, out, step.block_tables, step.kv_lens, step.query_starts, plan.partial, plan.parts,
        scale * LOG2_E, q.stride(0), turned.stride(0), out.stride(0), cache.stride(0), step.block_tables.stride(0),
        rows[0], first_token, num_rows, plan.num_parts,
        NUM_HEADS=num_heads, NOPE=turned.shape[2] - rope_dim, RANK=rank, ROPE=rope_dim, BLOCK_SIZE=step.block_size,
        HEADS=HEADS, TILE=TILE, PART=rank + PART_ENDS,
        **deal_options(plan, num_rows), **chain_options(q, WARPS),
    )  # fmt: skip
