"""What surrounds a generation step's layers, in Triton: one kernel before them and one after them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import slot_table
from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels.decode_rows import DecodeRows
from headrace.kernels.slot_table import SlotTable

TILE = 1024

_MIN_LEN = tl.constexpr(slot_table.MIN_LEN)
_MAX_LEN = tl.constexpr(slot_table.MAX_LEN)
_COUNTS = tl.constexpr(slot_table.COUNTS)
_NUM_INTS = tl.constexpr(slot_table.NUM_INTS)


@triton.jit
def _rows_kernel(
    slots,
    last_token,
    num_tokens,
    done,
    table,
    ids,
    positions,
    kv_lens,
    short_lens,
    was_done,
    row_table,
    write_slots,
    table_stride,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (tiles of a block table, rows). Of a row's blocks only those that it has."""
    wait_for_predecessor(CHAINED)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    is_over = tl.load(done + slot) != 0
    start = tl.where(is_over, 0, tl.load(num_tokens + slot))
    entries = table + slot * table_stride
    if tile == 0:
        tl.store(ids + row, tl.load(last_token + slot))
        tl.store(positions + row, start)
        tl.store(kv_lens + row, start + 1)
        tl.store(short_lens + row, (start + 1).to(tl.int32))
        tl.store(was_done + row, is_over)
        block = tl.where(is_over, 0, tl.load(entries + start // BLOCK_SIZE)).to(tl.int64)
        tl.store(write_slots + row, block * BLOCK_SIZE + start % BLOCK_SIZE)
    at = tile * TILE + tl.arange(0, TILE)
    inside = (at < num_blocks) & (at <= start // BLOCK_SIZE)
    blocks = tl.where(is_over, 0, tl.load(entries + at, mask=inside, other=0))
    tl.store(row_table + row * num_blocks + at, blocks, mask=inside)


def launch_decode_rows(
    slots: Tensor, last_token: Tensor, num_tokens: Tensor, done: Tensor, table: Tensor, *, block_size: int
) -> DecodeRows:
    """The contract of `decode_rows`; entries of `table` past a row's blocks are not written."""
    num_rows, num_blocks = len(slots), table.shape[1]
    assert table.stride(1) == 1
    ids, positions, kv_lens, write_slots = torch.empty((4, num_rows), dtype=torch.int64, device=slots.device)
    short_lens = torch.empty(num_rows, dtype=torch.int32, device=slots.device)
    was_done = torch.empty(num_rows, dtype=torch.bool, device=slots.device)
    row_table = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=slots.device)
    if num_rows:
        grid(_rows_kernel, triton.cdiv(num_blocks, TILE), num_rows)(
            slots,
            last_token,
            num_tokens,
            done,
            table,
            ids,
            positions,
            kv_lens,
            short_lens,
            was_done,
            row_table,
            write_slots,
            table.stride(0),
            num_blocks,
            BLOCK_SIZE=block_size,
            TILE=min(TILE, max(16, power_of_2(num_blocks))),
            **chain_options(slots, 4),
        )
    return DecodeRows(ids, positions, kv_lens, short_lens, was_done, row_table, write_slots)


@triton.jit
def _accept_kernel(
    tokens,
    logits,
    slots,
    kv_lens,
    was_done,
    ints,
    counts,
    last_token,
    num_tokens,
    done,
    out,
    logits_stride,
    ints_stride,
    vocab,
    num_stops,
    num_rows,
    HAS_COUNTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (rows)."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    slot, token = tl.load(slots + row), tl.load(tokens + row)
    length = tl.load(kv_lens + row)
    whole = ints + slot * ints_stride
    value = tl.load(logits + row * logits_stride + token).to(tl.float32)
    is_bad = value != value
    is_over = tl.load(was_done + row) != 0
    is_stop = length + 1 < 0
    for at in range(num_stops):
        is_stop = is_stop | (tl.load(whole + _NUM_INTS + at) == token)
    ends = (is_stop & (length + 1 > tl.load(whole + _MIN_LEN))) | (length + 1 >= tl.load(whole + _MAX_LEN))
    tl.store(last_token + slot, token)
    tl.store(num_tokens + slot, length)
    tl.store(done + slot, ends | is_bad | is_over)
    tl.store(out + row, token)
    tl.store(out + num_rows + row, is_over.to(tl.int64))
    tl.store(out + 2 * num_rows + row, is_bad.to(tl.int64))
    if HAS_COUNTS:
        counted = tl.load(whole + _COUNTS)
        if counted >= 0:
            place = counts + counted * vocab + token
            tl.store(place, tl.load(place) + 2)


def launch_accept(
    tokens: Tensor,
    logits: Tensor,
    slots: Tensor,
    kv_lens: Tensor,
    was_done: Tensor,
    table: SlotTable,
    *,
    last_token: Tensor,
    num_tokens: Tensor,
    done: Tensor,
) -> Tensor:
    """The contract of `accept_tokens`."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and kv_lens.dtype == slots.dtype == tokens.dtype == torch.int64
    out = torch.empty((3, num_rows), dtype=torch.int64, device=logits.device)
    if num_rows:
        grid(_accept_kernel, num_rows)(
            tokens,
            logits,
            slots,
            kv_lens,
            was_done,
            table.ints,
            table.counts,
            last_token,
            num_tokens,
            done,
            out,
            logits.stride(0),
            table.ints.stride(0),
            vocab,
            table.ints.shape[1] - slot_table.NUM_INTS,
            num_rows,
            HAS_COUNTS=len(table.counts) > 0,
            **chain_options(tokens, 1),
        )
    return out
