"""The inputs of a step in which each row generates one token, from the slots' state."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["decode_rows"]


class DecodeRows(NamedTuple):
    ids: Tensor  # [rows] int64, each slot's last token
    positions: Tensor  # [rows] int64
    kv_lens: Tensor  # [rows] int64, tokens in the cache once this step's are written
    short_lens: Tensor  # [rows] int32, the same
    was_done: Tensor  # [rows] bool
    table: Tensor  # [rows, max blocks] int32
    write_slots: Tensor  # [rows] int64, block * block size + place in it


def decode_rows(
    slots: Tensor, last_token: Tensor, num_tokens: Tensor, done: Tensor, table: Tensor, *, block_size: int
) -> DecodeRows:
    """Rows of sequences that have ended compute a token at position 0 into block 0, which nobody reads.

    Args:
        slots: [rows] int64.
        last_token: [slots] int64.
        num_tokens: [slots] int64, tokens in the cache.
        done: [slots] bool.
        table: [slots, max blocks] int32, one layer group's.

    Returns:
        Entries of `table` past a row's last block mean nothing.
    """
    if not slots.is_cuda:
        return decode_rows_twin(slots, last_token, num_tokens, done, table, block_size=block_size)
    from headrace.kernels._triton_slots import launch_decode_rows

    return launch_decode_rows(slots, last_token, num_tokens, done, table, block_size=block_size)


def decode_rows_twin(
    slots: Tensor, last_token: Tensor, num_tokens: Tensor, done: Tensor, table: Tensor, *, block_size: int
) -> DecodeRows:
    """The plain torch form of `decode_rows`."""
    was_done = done[slots]
    start = num_tokens[slots].masked_fill(was_done, 0)
    own = table[slots].masked_fill(was_done[:, None], 0)
    blocks = own.gather(1, start[:, None] // block_size).squeeze(1).long()
    write_slots = blocks * block_size + start % block_size
    return DecodeRows(last_token[slots], start, start + 1, (start + 1).int(), was_done, own, write_slots)
