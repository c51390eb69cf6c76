"""From a section of the plan and the slot state to the packed tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.attention.port import AttentionStep
from headrace.engine.slots import SlotState, as_device
from headrace.seam import PROMPT_LOGPROBS, SAMPLE, Section


@dataclass(slots=True)
class Batch:
    """One step's rows on the device."""

    slots: Tensor  # [rows] int64
    ids: Tensor  # [tokens] int64
    groups: list[AttentionStep]
    kv_lens: Tensor  # [rows] int64, tokens in the cache once this step's are written
    was_done: Tensor  # [rows] bool: a generation row of a sequence that has ended meanwhile
    query_starts: NDArray[np.int64]  # [rows + 1] on the host
    sample_rows: NDArray[np.int64]
    """Rows that yield a token, on the host."""
    prompt_rows: NDArray[np.int64]
    """Rows whose prompt log-probabilities are wanted."""


def build_batch(section: Section, state: SlotState, *, block_size: int) -> Batch:
    """Pack the rows. A generation row begins at its slot's own length with its last token.

    Rows of sequences that have ended compute one token at position 0 into the dummy block, so that
    their shape stays and nothing of theirs is touched.
    """
    device = state.device
    counts = section.num_tokens.astype(np.int64)
    query_starts = np.concatenate([[0], np.cumsum(counts)])
    bounds = state.raise_bounds(section)
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(query_starts[-1]) - query_starts[row_of_token]

    slots = as_device(section.slot, device).long()
    start = as_device(section.start, device).long()
    from_device = start < 0
    was_done = from_device & state.done[slots]
    start = torch.where(from_device, state.num_tokens[slots], start).masked_fill(was_done, 0)
    rows = torch.from_numpy(row_of_token).to(device)
    positions = start[rows] + torch.from_numpy(inside).to(device)
    kv_lens = start + as_device(section.num_tokens, device)
    groups = [
        _group_step(table[slots], positions, rows, was_done, kv_lens, query_starts, bounds, section, block_size)
        for table in state.tables
    ]
    flags = section.flags
    return Batch(
        slots=slots,
        ids=_ids(section, state, slots),
        groups=groups,
        kv_lens=kv_lens,
        was_done=was_done,
        query_starts=query_starts,
        sample_rows=np.flatnonzero(flags & SAMPLE),
        prompt_rows=np.flatnonzero(flags & PROMPT_LOGPROBS),
    )


def _ids(section: Section, state: SlotState, slots: Tensor) -> Tensor:
    """Known ids of context rows, then the last token of each generation row (drafts are filled in by the drafter)."""
    assert not section.num_drafts.any(), "drafts need a drafter; this engine has none"
    known = as_device(section.ids, state.device).long()
    return torch.cat([known, state.last_token[slots[section.num_context_rows :]]])


def _group_step(
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    was_done: Tensor,
    kv_lens: Tensor,
    query_starts: NDArray[np.int64],
    bounds: NDArray[np.int64],
    section: Section,
    block_size: int,
) -> AttentionStep:
    max_kv = int(bounds.max())
    table = table[:, : -(-max_kv // block_size)]
    table = table.masked_fill(was_done[:, None], 0)
    blocks = table[rows, positions // block_size]
    return AttentionStep(
        block_size=block_size,
        query_starts=torch.from_numpy(query_starts).to(positions.device, torch.int32),
        kv_lens=kv_lens.int(),
        positions=positions,
        block_tables=table,
        write_slots=blocks.long() * block_size + positions % block_size,
        max_query=int(section.num_tokens.max()),
        max_kv=max_kv,
        num_context_rows=section.num_context_rows,
    )
