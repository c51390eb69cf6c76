"""The slots' state after a step in which each row generated one token."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import slot_table as columns
from headrace.kernels.slot_table import SlotTable

__all__ = ["accept_tokens"]


def accept_tokens(
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
    """A slot is done by a stop id past its least length, at its full length, or by a token whose logit is no number.

    Args:
        tokens: [rows] int64.
        logits: [rows, vocab], rows contiguous; a row with a NaN has it at its token.
        slots: [rows] int64; no slot stands in two rows, but those that are done.
        kv_lens: [rows] int64.
        was_done: [rows] bool.
        table: `counts` goes up by 2 for slots that have a row there.
        last_token, num_tokens: [slots] int64, written to.
        done: [slots] bool, written to.

    Returns:
        [3, rows] int64: token, was done, whether its logit is no number.
    """
    if not logits.is_cuda:
        form = accept_tokens_twin
    else:
        from headrace.kernels._triton_slots import launch_accept as form
    return form(
        tokens, logits, slots, kv_lens, was_done, table, last_token=last_token, num_tokens=num_tokens, done=done
    )


def accept_tokens_twin(
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
    """The plain torch form of `accept_tokens`."""
    ints = table.ints[slots]
    is_bad = logits.gather(1, tokens[:, None]).squeeze(1).isnan()
    is_stop = (tokens[:, None] == ints[:, columns.NUM_INTS :]).any(1)
    ends = is_stop & (kv_lens + 1 > ints[:, columns.MIN_LEN]) | (kv_lens + 1 >= ints[:, columns.MAX_LEN])
    last_token[slots] = tokens
    num_tokens[slots] = kv_lens
    done[slots] = ends | is_bad | was_done
    rows = ints[:, columns.COUNTS]
    counted = rows >= 0
    table.counts[rows[counted], tokens[counted]] += 2
    return torch.stack((tokens, was_done.long(), is_bad.long()))
