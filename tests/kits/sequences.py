"""The runner driven as an engine would, over any device: packed rows, chunks, a block table with blocks in any order,
blocks and states that a row takes over from another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, AttentionStep
from headrace.engine.backends import ORACLE, Backends
from headrace.engine.groups import group_layers
from headrace.engine.pools import KvPools
from headrace.engine.runner import GroupStep, Runner
from headrace.engine.states import States, state_specs
from headrace.layers.port import Model, StateStep
from headrace.seam import ints

BLOCK_SIZE = 4
NUM_SLOTS = 16
NUM_BLOCKS = 64


@dataclass(frozen=True)
class Place:
    """Where a model is computed, and by which files of the attention room."""

    device: str = "cpu"
    implementation: str = ORACLE


HOST = Place()


@dataclass
class Row:
    """One sequence: what is in the cache, and where."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    slot: int | None = None
    """Of its recurrent states, from its first step on."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Of a snapshot: by recurrent group, the block."""


class Sequences:
    """Sequences over one runner. Blocks are dealt in random order, and never dealt twice."""

    def __init__(
        self,
        model: Model,
        *,
        block_size: int = BLOCK_SIZE,
        num_blocks: int = NUM_BLOCKS,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        place: Place = HOST,
    ) -> None:
        """Args: place: where the model's weights are."""
        backends = Backends(place.implementation, chosen=[backend] if backend else [])
        self.device = device = torch.device(place.device)
        self.block_size = block_size
        self.groups = group_layers(model.layers, dtype)
        self.pools = KvPools(
            self.groups, [num_blocks] * len(self.groups), block_size=block_size, backends=backends, device=device
        )
        self.states = States(self.groups, state_specs(model.layers), num_slots=NUM_SLOTS, device=device)
        self.num_slots = 0
        self.runner = Runner(model, backends, self.pools, states=self.states.layers)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)

    def fork(self, row: Row) -> Row:
        """A row that begins where this one is: a prefix hit of its full blocks and of a snapshot of its states."""
        assert row.num_cached % self.block_size == 0, "only full blocks are shared"
        other = Row(list(row.blocks), row.num_cached, self._new_slot())
        for tensors in self.states.layers.values():
            for tensor in tensors:
                tensor[other.slot] = tensor[row.slot]
        return other

    def save(self, row: Row) -> Row:
        """A snapshot of a row: its full blocks, and its states in a block of each recurrent group. It takes no step."""
        assert row.num_cached % self.block_size == 0 and row.slot is not None
        saved = Row(list(row.blocks), row.num_cached)
        for group in [at for at, spec in enumerate(self.groups) if spec.is_recurrent]:
            saved.snapshots[group] = self.free.pop()
            self.states.save(ints([[group, row.slot, saved.snapshots[group]]]), self.pools.arenas)
        return saved

    def resume(self, saved: Row) -> Row:
        """A row that begins at a snapshot."""
        row = Row(list(saved.blocks), saved.num_cached, self._new_slot())
        for group, block in saved.snapshots.items():
            self.states.restore(ints([[group, block, row.slot]]), self.pools.arenas)
        return row

    def _new_slot(self) -> int:
        self.num_slots += 1
        assert self.num_slots <= NUM_SLOTS
        return self.num_slots - 1

    def step(self, chunks: Sequence[tuple[Row, Sequence[int]]], *, keep: int | None = None) -> list[Tensor]:
        """Compute chunks of rows in one step. -> by row, logits of its last `keep` tokens (or all): [tokens, vocab]"""
        for row, ids in chunks:
            if row.slot is None:
                row.slot = self._new_slot()
            while len(row.blocks) * self.block_size < row.num_cached + len(ids):
                row.blocks.append(self.free.pop())
        ends = torch.tensor([len(ids) for _, ids in chunks]).cumsum(0).tolist()
        lengths = [len(ids) if keep is None else min(keep, len(ids)) for _, ids in chunks]
        rows = self._tensor([at for end, length in zip(ends, lengths) for at in range(end - length, end)])
        ids = self._tensor([token for _, ids in chunks for token in ids])
        groups: list[GroupStep] = [
            self._state_step(chunks) if group.is_recurrent else self._attention_step(chunks) for group in self.groups
        ]
        hidden = self.runner.forward(ids, groups, rows=rows)
        for row, chunk in chunks:
            row.num_cached += len(chunk)
        return list(self.runner.logits(hidden).cpu().split(lengths))

    def _state_step(self, chunks: Sequence[tuple[Row, Sequence[int]]]) -> StateStep:
        positions = [row.num_cached + i for row, ids in chunks for i in range(len(ids))]
        starts = [0, *accumulate(len(ids) for _, ids in chunks)]
        num_context = _num_context_rows(chunks)
        return StateStep(
            slots=self._tensor([row.slot for row, _ in chunks]),
            query_starts=self._tensor(starts).int(),
            positions=self._tensor(positions),
            max_query=max(len(ids) for _, ids in chunks),
            num_context_rows=num_context,
            context_starts=tuple(starts[: num_context + 1]),
        )

    def _attention_step(self, chunks: Sequence[tuple[Row, Sequence[int]]]) -> AttentionStep:
        positions = [row.num_cached + i for row, ids in chunks for i in range(len(ids))]
        rows = [row for row, ids in chunks for _ in ids]
        slots = [
            row.blocks[at // self.block_size] * self.block_size + at % self.block_size
            for row, at in zip(rows, positions)
        ]
        starts = [0, *accumulate(len(ids) for _, ids in chunks)]
        kv_lens = [row.num_cached + len(ids) for row, ids in chunks]
        tables = torch.zeros(len(chunks), max(len(row.blocks) for row, _ in chunks), dtype=torch.int32)
        for table, (row, _) in zip(tables, chunks):
            table[: len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
        return AttentionStep(
            block_size=self.block_size,
            query_starts=self._tensor(starts).int(),
            kv_lens=self._tensor(kv_lens).int(),
            positions=self._tensor(positions),
            block_tables=tables.to(self.device),
            write_slots=self._tensor(slots),
            max_query=max(len(ids) for _, ids in chunks),
            max_kv=max(kv_lens),
            num_context_rows=(num_context := _num_context_rows(chunks)),
            context_rows=tuple((len(ids), kv_len) for (_, ids), kv_len in zip(chunks[:num_context], kv_lens)),
        )

    def _tensor(self, values: Sequence[int | None]) -> Tensor:
        """int64"""
        return torch.tensor(values, device=self.device)


def _num_context_rows(chunks: Sequence[tuple[Row, Sequence[int]]]) -> int:
    return max((place + 1 for place, (_, ids) in enumerate(chunks) if len(ids) != 1), default=0)
