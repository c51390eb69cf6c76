"""Logits rewritten by their slots' rules, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import slot_table
from headrace.kernels._triton_chain import grid
from headrace.kernels.slot_table import SlotTable

SHAPE_TILE = 2048

_REPETITION = tl.constexpr(slot_table.REPETITION)
_PRESENCE = tl.constexpr(slot_table.PRESENCE)
_FREQUENCY = tl.constexpr(slot_table.FREQUENCY)
_MASK_LEN = tl.constexpr(slot_table.MASK_LEN)
_COUNTS = tl.constexpr(slot_table.COUNTS)
_BIASES = tl.constexpr(slot_table.BIASES)
_NUM_INTS = tl.constexpr(slot_table.NUM_INTS)


@triton.jit
def _shape_kernel(
    logits,
    out,
    slots,
    lengths,
    floats,
    ints,
    counts,
    bias_ids,
    bias_values,
    row_stride,
    floats_stride,
    ints_stride,
    biases_stride,
    vocab,
    num_valid,
    num_biases,
    num_stops,
    TILE: tl.constexpr,
):
    """Programs: (tiles of the vocabulary, rows)."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row)
    numbers, whole = floats + slot * floats_stride, ints + slot * ints_stride
    value = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    biases = tl.load(whole + _BIASES)
    if biases >= 0:
        for at in range(num_biases):
            token = tl.load(bias_ids + biases * biases_stride + at)
            bias = tl.load(bias_values + biases * biases_stride + at)
            value = tl.where(index == token, value + bias, value)
    counted = tl.load(whole + _COUNTS)
    if counted >= 0:
        count = tl.load(counts + counted * vocab + index, mask=index < vocab, other=0)
        factor = tl.load(numbers + _REPETITION).to(tl.float32)
        repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        value = tl.where(count > 0, repeated, value)
        value -= (count >> 1).to(tl.float32) * tl.load(numbers + _FREQUENCY).to(tl.float32)
        value = tl.where(count > 1, value - tl.load(numbers + _PRESENCE).to(tl.float32), value)
    if tl.load(lengths + row) + 1 <= tl.load(whole + _MASK_LEN):
        for at in range(num_stops):
            value = tl.where(index == tl.load(whole + _NUM_INTS + at), float("-inf"), value)
    value = tl.where(index < num_valid, value, float("-inf"))
    tl.store(out + row * vocab + index, value, mask=index < vocab)


def launch_shape(logits: Tensor, slots: Tensor, lengths: Tensor, table: SlotTable, *, num_valid: int) -> Tensor:
    """The contract of `shape_logits`."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and table.counts.is_contiguous() and lengths.dtype == slots.dtype == torch.int64
    out = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits.device)
    if num_rows:
        grid(_shape_kernel, triton.cdiv(vocab, SHAPE_TILE), num_rows)(
            logits,
            out,
            slots,
            lengths,
            table.floats,
            table.ints,
            table.counts,
            table.bias_ids,
            table.bias_values,
            logits.stride(0),
            table.floats.stride(0),
            table.ints.stride(0),
            table.bias_ids.stride(0),
            vocab,
            num_valid,
            table.bias_ids.shape[1],
            table.ints.shape[1] - slot_table.NUM_INTS,
            TILE=SHAPE_TILE,
            num_warps=8,
            # a product and a sum, each rounded as the torch form rounds it
            enable_fp_fusion=False,
        )
    return out
