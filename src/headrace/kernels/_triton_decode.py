"""Attention of rows with one token each over the paged cache: grouped heads, the context split over programs.

The query heads that read a KV head share its tiles. A long context is cut in parts (flash-decoding, Dao et al. 2023);
the last part of a row to finish merges them, so that there is no second kernel. Lengths are read on the device: the
grid depends on the number of rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels.port import HeadsSpec, PackedRows
from headrace.kernels.quantise import FP8, Form, Quantised

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
TARGET_PROGRAMS = 1024
"""Parts are made until there are about this many programs: several for each of a large GPU's processors."""
MANY_PROGRAMS = 4096
"""With more rows than fill the GPU parts still cut very long contexts, but only these."""
FEW_PROGRAMS = 512
FEW_PART_TOKENS = 256
MANY_PART_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How contexts are cut, and where parts meet. Shared by all layers of a group, which run one after another."""

    num_splits: int
    min_part: int
    """Fewest tokens of a part."""
    partial: Tensor  # [rows, heads, splits, dim + 2] float32: weighted values, then maximum and sum
    arrived: Tensor  # [rows, kv_heads] int32, zero between launches


def plan_decode(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, *, max_kv: int, device: torch.device
) -> DecodePlan:
    """Args: max_kv: an upper bound of the rows' lengths."""
    programs = max(1, num_rows * num_kv_heads)
    if 2 * programs <= TARGET_PROGRAMS:
        num_splits, min_part = -(-TARGET_PROGRAMS // programs), FEW_PART_TOKENS
    else:
        num_splits, min_part = max(1, MANY_PROGRAMS * 4 // programs), MANY_PART_TOKENS
    num_splits = max(1, min(num_splits, MAX_SPLITS, -(-max_kv // min_part)))
    rows = num_rows if num_splits > 1 else 1
    return DecodePlan(
        num_splits,
        min_part,
        torch.empty((rows, num_heads, num_splits, head_dim + 2), dtype=torch.float32, device=device),
        torch.zeros((rows, num_kv_heads), dtype=torch.int32, device=device),
    )


@triton.jit
def _capped(scores, cap, scale):
    """scale is log2(e) times the softmax's scale: with a cap the scores come in units of log2 after it."""
    return cap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores * scale / cap)))


@triton.jit
def _merge_parts(
    place,
    num_parts,
    head_mask,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """place: [GROUP_BLOCK] each head's first part, DIM weighted values, then maximum and sum."""
    parts, dims = tl.arange(0, MAX_PARTS), tl.arange(0, DIM_BLOCK)
    ends = place[:, None] + parts[None, :] * (DIM + 2) + DIM
    there = head_mask[:, None] & (parts < num_parts)[None, :]
    peaks = tl.load(ends, mask=there, other=float("-inf"), cache_modifier=".cg")
    highest = tl.maximum(tl.max(peaks, 1), -1e30)
    shares = tl.load(ends + 1, mask=there, other=0.0, cache_modifier=".cg")
    total = tl.sum(shares * tl.exp2(peaks - highest[:, None]), 1)
    acc = tl.zeros((DIM_BLOCK, GROUP_BLOCK), tl.float32)
    for base in range(0, num_parts, UNROLLED):
        # Loads that don't wait for each other: a part at a time would be a memory latency each.
        for step in tl.static_range(UNROLLED):
            at_part = place + (base + step) * (DIM + 2)
            mask = tl.where(base + step < num_parts, head_mask, False)
            peak = tl.load(at_part + DIM, mask=mask, other=float("-inf"), cache_modifier=".cg")
            inside = (dims < DIM)[:, None] & mask[None, :]
            values = tl.load(at_part[None, :] + dims[:, None], mask=inside, other=0.0, cache_modifier=".cg")
            acc += values * tl.exp2(peak - highest)[None, :]
    return highest, total, acc


@triton.jit(do_not_specialize=["num_splits", "first_row", "window", "sink_tokens", "min_part", "table_stride"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tables,
    kv_lens,
    query_starts,
    sinks,
    partial,
    arrived,
    out_scale,
    scale,
    cap,
    v_scale,
    q_stride,
    out_stride,
    k_block_stride,
    k_head_stride,
    v_block_stride,
    v_head_stride,
    table_stride,
    first_row,
    window,
    sink_tokens,
    num_splits,
    min_part,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SINK_TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8_OUT: tl.constexpr,
    COMPUTE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    UNROLLED: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (KV heads, rows, parts)."""
    wait_for_predecessor(CHAINED)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    kv_len = tl.load(kv_lens + first_row + row)
    token = tl.load(query_starts + first_row + row).to(tl.int64)
    index = tl.arange(0, GROUP_BLOCK)
    heads = kv_head * GROUP + index
    head_mask = index < GROUP
    dims = tl.arange(0, DIM_BLOCK)
    out_row = out + token * out_stride

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(kv_len - 1, 0) // window * window if IS_CHUNKED else tl.maximum(kv_len - window, 0)
    begin = 0 if HAS_SINK_TOKENS else first // TILE * TILE
    part = kv_len - begin
    if IS_SPLIT:
        part = tl.maximum(tl.cdiv(tl.cdiv(part, num_splits), TILE) * TILE, min_part)
    num_parts = tl.maximum(tl.cdiv(kv_len - begin, tl.maximum(part, 1)), 1)
    if split >= num_parts:
        return
    begin += split * part
    end = tl.minimum(begin + part, kv_len)

    # Heads are columns throughout: the narrow side of the tensor cores pads to 8, the wide one to 16.
    mine = (dims < DIM)[:, None] & head_mask[None, :]
    at_heads = dims[:, None] + heads[None, :] * DIM
    query = tl.load(q + token * q_stride + at_heads, mask=mine, other=0.0).to(COMPUTE)
    highest = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    acc = tl.zeros((DIM_BLOCK, GROUP_BLOCK), tl.float32)
    table = tables + (first_row + row).to(tl.int64) * table_stride
    k_head, v_head = k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        seen = (at >= first) & (at < end)
        if HAS_SINK_TOKENS:
            seen = ((at >= first) | (at < sink_tokens)) & (at < end)
        block = tl.load(table + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        inside = at % BLOCK_SIZE * DIM
        mask = seen[:, None] & (dims < DIM)[None, :]
        keys = tl.load(k_head + (block * k_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(keys.to(COMPUTE), query, input_precision="ieee")  # [TILE, GROUP_BLOCK]
        if HAS_CAP:
            scores = _capped(scores, cap, scale / 1.4426950408889634)
        else:
            scores = scores * scale
        scores = tl.where(seen[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 0))
        if HAS_SINK_TOKENS:
            new_highest = tl.maximum(new_highest, -1e30)  # a tile between the sink and the window shows nothing
        fade = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[None, :])
        total = total * fade + tl.sum(weights, 0)
        values = tl.load(v_head + (block * v_block_stride + inside)[:, None] + dims[None, :], mask=mask, other=0.0)
        acc = tl.dot(tl.trans(values.to(COMPUTE)), weights.to(COMPUTE), acc * fade[None, :], input_precision="ieee")
        highest = new_highest

    if IS_SPLIT:
        if num_parts > 1:
            place = partial + ((row * num_kv_heads * GROUP + heads) * num_splits + split).to(tl.int64) * (DIM + 2)
            tl.store(place[None, :] + dims[:, None], acc, mask=mine)
            tl.store(place + DIM, highest, mask=head_mask)
            tl.store(place + DIM + 1, total, mask=head_mask)
            # The barrier orders every thread's stores before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrived + row * num_kv_heads + kv_head, 1, sem="acq_rel") < num_parts - 1:
                return
            tl.store(arrived + row * num_kv_heads + kv_head, 0)
            tl.debug_barrier()
            place = partial + ((row * num_kv_heads * GROUP + heads) * num_splits).to(tl.int64) * (DIM + 2)
            highest, total, acc = _merge_parts(
                place, num_parts, head_mask, DIM, DIM_BLOCK, GROUP_BLOCK, MAX_PARTS, UNROLLED
            )
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=head_mask, other=0.0).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - highest)
    acc = acc * (v_scale / tl.where(total > 0.0, total, 1.0))[None, :]
    if IS_FP8_OUT:
        acc = tl.minimum(tl.maximum(acc / tl.load(out_scale), -448.0), 448.0)
    tl.store(out_row + at_heads, acc.to(out.dtype.element_ty), mask=mine)


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: PackedRows,
    spec: HeadsSpec,
    *,
    out: Quantised,
    form: Form,
    plan: DecodePlan,
    first_row: int,
    tuning: tuple[int, int, int] | None = None,
) -> None:
    """Attend rows from `first_row` on, each of one token, the last of its context.

    Args:
        q: [tokens, heads, dim], heads contiguous.
        out: [tokens, heads * dim] to write to; FP8 for the form `static`.
        tuning: (tile, warps, stages).
    """
    num_rows = step.kv_lens.shape[0] - first_row
    if num_rows <= 0:
        return
    num_kv_heads, dim = k_cache.shape[1], q.shape[2]
    is_fp8 = k_cache.dtype == FP8
    num_programs = num_rows * num_kv_heads * plan.num_splits
    tile, warps, stages = tuning or tuned(dim, k_cache.dtype, num_programs=num_programs)
    grid(_decode_kernel, num_kv_heads, num_rows, plan.num_splits)(
        q,
        k_cache,
        v_cache,
        out.data,
        step.block_tables,
        step.kv_lens,
        step.query_starts,
        q if spec.sinks is None else spec.sinks,
        plan.partial,
        plan.arrived,
        q if form.scale is None else form.scale,
        spec.scale * (spec.k_scale if is_fp8 else 1.0) * LOG2_E,
        spec.soft_cap or 0.0,
        spec.v_scale if is_fp8 else 1.0,
        *strides(q, out.data, k_cache, v_cache),
        step.block_tables.stride(0),
        first_row,
        spec.window or 0,
        spec.sink_tokens,
        plan.num_splits,
        plan.min_part,
        BLOCK_SIZE=step.block_size,
        TILE=tile,
        IS_SPLIT=plan.num_splits > 1,
        IS_FP8_OUT=form.kind == "static",
        MAX_PARTS=MAX_SPLITS,
        UNROLLED=8 if q.is_cuda else 1,
        STAGES=stages,
        **constants(q, spec, num_kv_heads, is_fp8=is_fp8),
        GROUP_BLOCK=max(8, power_of_2(q.shape[1] // num_kv_heads)),
        **chain_options(q, warps),
    )


def tuned(dim: int, kv_dtype: torch.dtype, *, num_programs: int) -> tuple[int, int, int]:
    """(tile, warps, stages), measured on an H200: docs/performance.md.

    With many programs small ones, of which a processor holds several; with few, wide ones that read much at once.
    """
    row_bytes = power_of_2(dim) * kv_dtype.itemsize
    if row_bytes > 1024:
        return 16, 8, 2
    if row_bytes > 512:
        return 16, 4, 2
    if row_bytes > 256:
        return 32, 4, 2
    if num_programs <= FEW_PROGRAMS:
        return max(64, min(FEW_PART_TOKENS, 32768 // row_bytes)), 8, 1
    return (32, 1, 1) if kv_dtype == FP8 else (32, 1, 2)


def strides(q: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[int, ...]:
    """Of a token's heads in and out, and of blocks and KV heads."""
    dim = q.shape[2]
    assert q.stride(1) == dim and q.stride(2) == 1 and k_cache.stride()[2:] == v_cache.stride()[2:] == (dim, 1)
    return (q.stride(0), out.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2])


def constants(q: Tensor, spec: HeadsSpec, num_kv_heads: int, *, is_fp8: bool) -> dict[str, Any]:
    """What an attention kernel is compiled for, of the layer. q: [tokens, heads, dim]"""
    num_heads, dim = q.shape[1:]
    return {
        "GROUP": num_heads // num_kv_heads,
        "DIM": dim,
        "DIM_BLOCK": max(16, power_of_2(dim)),
        "HAS_WINDOW": spec.window is not None,
        "IS_CHUNKED": spec.is_chunked,
        "HAS_SINK_TOKENS": spec.window is not None and spec.sink_tokens > 0,
        "HAS_CAP": spec.soft_cap is not None,
        "HAS_SINKS": spec.sinks is not None,
        "COMPUTE": compute_dtype(q, is_fp8=is_fp8),
    }


def compute_dtype(q: Tensor, *, is_fp8: bool) -> tl.dtype:
    """What products are computed in. FP8 becomes float16 in one instruction, exactly."""
    if q.dtype == torch.float32 or (not q.is_cuda and not is_fp8):
        return tl.float32  # the interpreter can't multiply bfloat16
    return tl.float16 if is_fp8 or q.dtype == torch.float16 else tl.bfloat16
