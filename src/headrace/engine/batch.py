"""From a section of the plan and the slot state to the packed tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.attention.port import AttentionStep
from headrace.engine.slots import SlotState
from headrace.engine.staging import stage
from headrace.kernels.decode_rows import DecodeRows, decode_rows
from headrace.layers.port import StateStep
from headrace.seam import (
    DUMMY_BLOCK,
    PROMPT_LOGPROBS,
    SAMPLE,
    SUM_HIDDEN,
    GroupSpec,
    Section,
    SectionResult,
)


@dataclass(slots=True)
class Batch:
    """One step's rows on the device."""

    slots: Tensor  # [rows] int64
    ids: Tensor  # [tokens] int64
    groups: list[AttentionStep | StateStep]
    kv_lens: Tensor  # [rows] int64, tokens in the cache once this step's are written
    was_done: Tensor  # [rows] bool: a generation row of a sequence that has ended meanwhile


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows yield a token and which hidden states are needed for that; on the host, and on the device."""

    query_starts: NDArray[np.int64]  # [rows + 1]
    sample_rows: NDArray[np.int64]
    """Rows that yield a token."""
    prompt_rows: NDArray[np.int64]
    """Rows whose prompt log-probabilities are wanted."""
    at: NDArray[np.int64]
    """[rows] where each row's last token stands among the wanted ones."""
    tokens: Tensor  # [wanted] int64, packed tokens
    rows: Tensor  # [sample rows] int64
    last: Tensor  # [sample rows] int64, of `at`


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows as the plan has them, on the device. int64."""

    slots: Tensor  # [rows]
    start: Tensor  # [rows] or FROM_DEVICE
    num_tokens: Tensor  # [rows]
    query_starts: Tensor  # [rows + 1]
    of_token: Tensor  # [tokens] row
    inside: Tensor  # [tokens] place within the row
    known_ids: Tensor  # [tokens of context rows]
    num_context_rows: int
    context_starts: tuple[int, ...]  # [context rows + 1] of query_starts, on the host
    max_query: int
    max_kv: int
    context_rows: tuple[tuple[int, int], ...] | None = None
    """As `AttentionStep` has it."""


def build_batch(
    section: Section, state: SlotState, *, groups: Sequence[GroupSpec], block_size: int
) -> tuple[Batch, Wanted]:
    """Pack the rows; one copy to the device."""
    assert not section.num_drafts.any(), "drafts need a drafter; this engine has none"
    counts = section.num_tokens.astype(np.int64)
    query_starts = np.concatenate([[0], np.cumsum(counts)])
    of_token = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(query_starts[-1]) - query_starts[of_token]
    sample_rows, prompt_rows = np.flatnonzero(section.flags & SAMPLE), np.flatnonzero(section.flags & PROMPT_LOGPROBS)
    wanted, at = _wanted_tokens(query_starts, np.flatnonzero(section.flags & (PROMPT_LOGPROBS | SUM_HIDDEN)))
    host = [section.slot, section.start, counts, query_starts, of_token, inside, section.ids]
    staged = stage([*host, wanted, sample_rows, at[sample_rows]], state.device)
    slots, start, num_tokens, starts, rows, places, ids, tokens, sampling, last = staged
    max_kv = int(state.raise_bounds(section).max())
    num_context = section.num_context_rows
    context_starts = tuple(query_starts[: num_context + 1].tolist())
    packed = Rows(
        slots, start, num_tokens, starts, rows, places, ids, num_context, context_starts, int(counts.max()), max_kv,
        context_rows_of(section),
    )  # fmt: skip
    batch = batch_of(packed, state, groups=groups, block_size=block_size)
    return batch, Wanted(query_starts, sample_rows, prompt_rows, at, tokens, sampling, last)


def context_rows_of(section: Section) -> tuple[tuple[int, int], ...]:
    """As `AttentionStep.context_rows`."""
    counts, starts = (values[: section.num_context_rows] for values in (section.num_tokens, section.start))
    return tuple(zip(counts.tolist(), (starts + counts).tolist()))


def _wanted_tokens(
    query_starts: NDArray[np.int64], whole_rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packed tokens whose hidden states are wanted, and where each row's last token stands among them."""
    last = query_starts[1:] - 1
    if not len(whole_rows):
        return last, np.arange(len(last))
    chosen = np.zeros(int(query_starts[-1]), np.bool_)
    chosen[last] = True
    for row in whole_rows.tolist():
        chosen[query_starts[row] : query_starts[row + 1]] = True
    wanted = np.flatnonzero(chosen)
    return wanted, np.searchsorted(wanted, last)


def generation_batch(
    slots: Tensor, query_starts: Tensor, state: SlotState, *, groups: Sequence[GroupSpec], block_size: int, max_kv: int
) -> Batch:
    """Rows that generate one token each, with nothing from the host.

    Args:
        slots: [rows] int64.
        query_starts: [rows + 1] int32, the numbers from 0.
        max_kv: a bound of the rows' lengths.
    """
    # The first group's call brings what is common to all; a recurrent group has no table, so any does.
    steps: list[AttentionStep | StateStep] = []
    common: DecodeRows | None = None
    for group, table in zip(groups, state.tables):
        is_first = common is None
        if group.is_recurrent and not is_first:
            found = common
        else:
            own = table[:, : -(-max_kv // block_size)]
            found = decode_rows(slots, state.last_token, state.num_tokens, state.done, own, block_size=block_size)
        assert found is not None
        common = common or found
        steps.append(
            StateStep(
                slots=slots.masked_fill(common.was_done, state.dummy),
                query_starts=query_starts,
                positions=common.positions,
                max_query=1,
                num_context_rows=0,
                context_starts=(0,),
            )
            if group.is_recurrent
            else AttentionStep(
                block_size=block_size,
                query_starts=query_starts,
                kv_lens=found.short_lens,
                positions=common.positions,
                block_tables=found.table,
                write_slots=found.write_slots,
                max_query=1,
                max_kv=max_kv,
                num_context_rows=0,
            )
        )
    assert common is not None
    return Batch(slots, common.ids, steps, common.kv_lens, common.was_done)


def batch_of(rows: Rows, state: SlotState, *, groups: Sequence[GroupSpec], block_size: int) -> Batch:
    """The device's part. A generation row begins at its slot's own length with its last token.

    Rows of sequences that have ended compute one token at position 0 into the dummy block and the dummy state, so
    that their shape stays and nothing of theirs is touched.
    """
    slots = rows.slots
    from_device = rows.start < 0
    was_done = from_device & state.done[slots]
    start = torch.where(from_device, state.num_tokens[slots], rows.start).masked_fill(was_done, 0)
    positions = start[rows.of_token] + rows.inside
    kv_lens = start + rows.num_tokens
    generated = state.last_token[slots[rows.num_context_rows :]]
    return Batch(
        slots=slots,
        ids=torch.cat([rows.known_ids, generated]) if rows.num_context_rows else generated,
        groups=[
            _state_step(rows, positions, was_done, state)
            if group.is_recurrent
            else _group_step(rows, table, positions, was_done, kv_lens, block_size=block_size)
            for group, table in zip(groups, state.tables)
        ],
        kv_lens=kv_lens,
        was_done=was_done,
    )


def _group_step(
    rows: Rows, table: Tensor, positions: Tensor, was_done: Tensor, kv_lens: Tensor, *, block_size: int
) -> AttentionStep:
    table = table[:, : -(-rows.max_kv // block_size)][rows.slots].masked_fill(was_done[:, None], DUMMY_BLOCK)
    blocks = table[rows.of_token, positions // block_size]
    return AttentionStep(
        block_size=block_size,
        query_starts=rows.query_starts.int(),
        kv_lens=kv_lens.int(),
        positions=positions,
        block_tables=table,
        write_slots=blocks.long() * block_size + positions % block_size,
        max_query=rows.max_query,
        max_kv=rows.max_kv,
        num_context_rows=rows.num_context_rows,
        context_rows=rows.context_rows,
    )


def _state_step(rows: Rows, positions: Tensor, was_done: Tensor, state: SlotState) -> StateStep:
    return StateStep(
        slots=rows.slots.masked_fill(was_done, state.dummy),
        query_starts=rows.query_starts.int(),
        positions=positions,
        max_query=rows.max_query,
        num_context_rows=rows.num_context_rows,
        context_starts=rows.context_starts,
    )


def leave_out(section: Section, rows: Collection[int]) -> Section:
    """The section without these rows."""
    if not rows:
        return section
    out = np.zeros(section.num_rows, np.bool_)
    out[list(rows)] = True
    of_context = out[: section.num_context_rows]
    id_is_out = np.repeat(of_context, section.num_tokens[: section.num_context_rows])
    return replace(
        section,
        slot=section.slot[~out],
        num_tokens=section.num_tokens[~out],
        start=section.start[~out],
        num_drafts=section.num_drafts[~out],
        tree=section.tree[~out],
        flags=section.flags[~out],
        num_context_rows=int((~of_context).sum()),
        ids=section.ids[~id_is_out],
        next_ids=section.next_ids[~of_context],
    )


def put_back(result: SectionResult, errors: Mapping[int, str]) -> SectionResult:
    """The result of all rows of a section, from that of a section without these rows, which failed."""
    if not errors:
        return result
    num_rows = len(result.num_accepted) + len(errors)
    kept = np.delete(np.arange(num_rows), list(errors))
    accepted = np.zeros(num_rows, np.int32)
    accepted[kept] = result.num_accepted
    return SectionResult(
        accepted,
        result.tokens,
        {int(kept[row]): value for row, value in result.logprobs.items()},
        {int(kept[row]): value for row, value in result.prompt_logprobs.items()},
        {int(kept[row]): value for row, value in result.logits.items()},
        {int(kept[row]): value for row, value in result.errors.items()} | dict(errors),
        {int(kept[row]): value for row, value in result.hidden.items()},
    )
