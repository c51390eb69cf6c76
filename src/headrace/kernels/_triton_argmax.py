"""Row-wise argmax in Triton: a vocabulary is cut in parts, so that few rows fill a GPU as well.

Value and index make one integer whose order is that of the values, then of falling indices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2

TILE = 2048
MAX_PARTS = 64
TARGET_PROGRAMS = 1024


@triton.jit
def _part_kernel(logits, keys, row_stride, vocab, part, num_parts, TILE: tl.constexpr):
    """Programs: (parts, rows)."""
    at, row = tl.program_id(0), tl.program_id(1)
    begin = at * part
    end = tl.minimum(begin + part, vocab)
    best = tl.full((TILE,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    values = logits + row.to(tl.int64) * row_stride
    for start in range(begin, end, TILE):
        index = start + tl.arange(0, TILE)
        value = tl.load(values + index, mask=index < end, other=float("-inf")).to(tl.float32)
        value = tl.where(value == 0.0, 0.0, value)  # -0.0 is no less than 0.0
        bits = value.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ordered = tl.where(value != value, 0x7FFFFFFF, ordered)
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
        best = tl.maximum(best, tl.where(index < end, key, -0x7FFFFFFFFFFFFFFF))
    tl.store(keys + row * num_parts + at, tl.max(best, 0))


@triton.jit
def _merge_kernel(keys, out, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    key = tl.load(keys + row * num_parts + at, mask=at < num_parts, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(key, 0) & 0x7FFFFFFF))


def launch_argmax(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows] int64"""
    num_rows = logits.shape[0]
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    keys = launch_part_keys(logits)
    num_parts = keys.shape[1]
    grid(_merge_kernel, num_rows)(keys, out, num_parts, PARTS=power_of_2(num_parts), num_warps=1)
    return out


def launch_part_keys(logits: Tensor) -> Tensor:
    """[rows, vocab], at least one row -> [rows, parts] int64: the largest value's bits in their order, then its id."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    num_parts = max(1, min(MAX_PARTS, TARGET_PROGRAMS // num_rows, -(-vocab // TILE)))
    part = -(-vocab // (num_parts * TILE)) * TILE
    num_parts = -(-vocab // part)
    keys = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    grid(_part_kernel, num_parts, num_rows)(
        logits, keys, logits.stride(0), vocab, part, num_parts, TILE=TILE, num_warps=8
    )
    return keys
