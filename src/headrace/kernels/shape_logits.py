"""Rewriting logits by their slots' rules: bias and bans, penalties, stop ids before the least length, padding ids."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import slot_table as columns
from headrace.kernels.slot_table import SlotTable

__all__ = ["shape_logits"]


def shape_logits(logits: Tensor, slots: Tensor, lengths: Tensor, table: SlotTable, *, num_valid: int) -> Tensor:
    """
    Args:
        logits: [rows, vocab] of any float dtype, rows contiguous. Read only: raw log-probabilities want them.
        slots: [rows] int64, whose rules each row has.
        lengths: [rows] int64, tokens of the sequence before the one that is sampled.
        num_valid: ids from here on can't come.

    Returns:
        [rows, vocab] float32, new. In this order: bias (Sampling.logit_bias, single bad words), repetition penalty
        (Keskar et al., "CTRL", 2019), frequency and presence penalties (OpenAI API reference), stop ids.
    """
    if not logits.is_cuda:
        return shape_logits_twin(logits, slots, lengths, table, num_valid=num_valid)
    from headrace.kernels._triton_sample import launch_shape

    return launch_shape(logits, slots, lengths, table, num_valid=num_valid)


def shape_logits_twin(logits: Tensor, slots: Tensor, lengths: Tensor, table: SlotTable, *, num_valid: int) -> Tensor:
    """The plain torch form of `shape_logits`, row by row."""
    out = logits.to(torch.float32, copy=True)
    for row, slot in enumerate(slots.tolist()):
        floats, ints, values = table.floats[slot].float(), table.ints[slot], out[row]
        at = int(ints[columns.BIASES])
        if at >= 0:
            there = table.bias_ids[at] >= 0
            values.index_add_(0, table.bias_ids[at][there], table.bias_values[at][there])
        at = int(ints[columns.COUNTS])
        if at >= 0:
            counts, factor = table.counts[at], floats[columns.REPETITION]
            repeated = torch.where(values > 0, values / factor, values * factor)
            values = torch.where(counts > 0, repeated, values)
            values -= (counts >> 1) * floats[columns.FREQUENCY]
            values -= (counts > 1) * floats[columns.PRESENCE]
            out[row] = values
        stops = ints[columns.NUM_INTS :]
        if int(lengths[row]) + 1 <= int(ints[columns.MASK_LEN]):
            out[row].index_fill_(0, stops[stops >= 0], -torch.inf)
    out[:, num_valid:] = -torch.inf
    return out
