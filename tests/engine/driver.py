"""A rank driven by hand: sections made row by row, blocks dealt from free lists, greedy tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.config.llm_args import LlmArgs
from headrace.engine.rank import Rank
from headrace.hub.source import resolve_model
from headrace.layers.parallel import ParallelContext
from headrace.seam import (
    FROM_DEVICE,
    SAMPLE,
    PoolSizes,
    Section,
    SectionResult,
    SlotInit,
    StepPlan,
    StepResult,
    int_rows,
    ints,
)
from headrace.types import Sampling

BLOCK = 4
NUM_BLOCKS = 40
NUM_SLOTS = 4


def open_rank(folder: Path, **changes: Any) -> Rank:
    torch.set_num_threads(1)
    args = LlmArgs.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "engine_threads": 1,
            "kv_cache_config": {"tokens_per_block": BLOCK},
            **changes,
        }
    )
    return Rank(args, resolve_model(str(folder)), ParallelContext(), num_valid_ids=None)


class Driver:
    """Slots over one rank. Blocks are dealt in rising order, and dealt again once given back."""

    def __init__(self, rank: Rank, **sizes: Any) -> None:
        self.rank = rank
        num_groups = len(rank.groups)
        rank.allocate(PoolSizes((NUM_BLOCKS,) * num_groups, NUM_SLOTS, **sizes))
        self.free = [list(range(NUM_BLOCKS - 1, 0, -1)) for _ in rank.groups]
        self.tables: dict[int, list[list[int]]] = {}
        """By slot and group."""
        self.lengths: dict[int, int] = {}
        self.steps = 0
        self._inits: list[SlotInit] = []
        self._blocks: list[list[tuple[int, int, int]]] = [[] for _ in rank.groups]

    def begin(self, slot: int, *, length: int = 0, **changes: Any) -> None:
        """With the next step; `length` tokens are in the cache by then, in blocks that this deals."""
        init = SlotInit(slot, 100 + slot, Sampling(), prompt_len=1, min_len=0, max_len=1000, stop_ids=())
        self._inits.append(dataclasses.replace(init, **changes))
        self.tables[slot] = [[] for _ in self.rank.groups]
        self.lengths[slot] = length
        self._extend(slot, length)

    def step(self, rows: Mapping[int, Sequence[int] | None], **changes: Any) -> StepResult:
        """One plan. By slot: ids to compute from where it is, or None for a generation row; ids come first."""
        slots = [slot for slot, ids in rows.items() if ids is not None]
        context = len(slots)
        slots += [slot for slot, ids in rows.items() if ids is None]
        chunks = [list(rows[slot] or ()) for slot in slots]
        counts = [len(ids) or 1 for ids in chunks]
        starts = [self.lengths[slot] if ids else FROM_DEVICE for slot, ids in zip(slots, chunks)]
        for slot, count in zip(slots, counts):
            self.lengths[slot] += count
            self._extend(slot, self.lengths[slot])
        section = Section(
            slot=ints(slots),
            num_tokens=ints(counts),
            start=ints(starts),
            num_drafts=ints([0] * len(slots)),
            tree=ints([0] * len(slots)),
            flags=ints([SAMPLE] * len(slots)),
            num_context_rows=context,
            ids=ints([token for ids in chunks for token in ids]),
            next_ids=ints([-1] * context),
            blocks=tuple(int_rows(triples, 3) for triples in self._blocks),
            inits=tuple(self._inits),
        )
        self._inits, self._blocks = [], [[] for _ in self.rank.groups]
        self.steps += 1
        return self.rank.run(StepPlan(self.steps, (dataclasses.replace(section, **changes),)))

    def rows(self, rows: Mapping[int, Sequence[int] | None], **changes: Any) -> SectionResult:
        return self.step(rows, **changes).sections[0]

    def generate(self, slot: int, count: int) -> list[int]:
        return [int(self.rows({slot: None}).tokens[0]) for _ in range(count)]

    def give_back(self, slot: int) -> None:
        for free, table in zip(self.free, self.tables.pop(slot)):
            free += [block for block in reversed(table) if block]

    def change_table(self, slot: int, group: int, index: int, block: int) -> None:
        """With the next step."""
        self.tables[slot][group][index] = block
        self._blocks[group].append((slot, index, block))

    def _extend(self, slot: int, length: int) -> None:
        for group, table in enumerate(self.tables[slot]):
            while not self.rank.groups[group].is_recurrent and len(table) * BLOCK < length:
                table.append(self.free[group].pop())
                self._blocks[group].append((slot, len(table) - 1, table[-1]))


def straight(rank_driver: Driver, prompt: Sequence[int], count: int) -> list[int]:
    """The prompt in one piece, then greedy tokens, in slot 0."""
    rank_driver.begin(0)
    tokens = [int(rank_driver.rows({0: prompt}).tokens[0])]
    tokens += rank_driver.generate(0, count - 1)
    rank_driver.give_back(0)
    return tokens
