"""An engine that answers at once with made-up tokens: what is left is the host's own cost (targets.md H1, H4)."""

from __future__ import annotations

from collections import deque

import numpy as np

from headrace.seam import (
    LAST_HIDDEN,
    SAMPLE,
    SUM_HIDDEN,
    EngineFacts,
    GroupSpec,
    PoolSizes,
    Section,
    SectionResult,
    StepPlan,
    StepResult,
)

HIDDEN_SIZE = 8


class InstantEngine:
    """Implements `seam.EnginePort`. The token at row r of step s is a hash of both; nothing is remembered.

    A request must end by its length: stop ids are not watched.
    """

    def __init__(self, *, vocab_size: int = 32_000, max_position: int = 1 << 20, free_bytes: int = 1 << 34) -> None:
        self._vocab_size = vocab_size
        self._max_position = max_position
        self._free_bytes = free_bytes
        self._results: deque[StepResult] = deque()

    def open(self) -> EngineFacts:
        return EngineFacts(
            model_type="instant",
            vocab_size=self._vocab_size,
            num_valid_ids=self._vocab_size,
            max_position=self._max_position,
            groups=(GroupSpec((0,), 1, 1, "none", bytes_per_token=64),),
            weight_bytes=0,
            activation_bytes=0,
            free_bytes=self._free_bytes,
            device="none",
            hidden_size=HIDDEN_SIZE,
        )

    def allocate(self, sizes: PoolSizes) -> None:
        pass

    def submit(self, plan: StepPlan) -> None:
        answers = tuple(self._answer(plan.step, each) for each in plan.sections)
        moved = [ids[:, 0] for each in plan.sections for ids in (each.copies, each.transfers)]
        done = {command.id: {"error": ""} for command in plan.commands}
        self._results.append(
            StepResult(plan.step, answers, finished_copies=np.concatenate(moved), finished_commands=done)
        )

    def _answer(self, step: int, section: Section) -> SectionResult:
        accepted = (section.flags & SAMPLE).astype(np.int32)
        count = int(accepted.sum())
        tokens = (np.arange(count, dtype=np.int64) * 31 + step * 17) % self._vocab_size
        pooled = np.flatnonzero(section.flags & (LAST_HIDDEN | SUM_HIDDEN)).tolist()
        hidden = {row: np.ones(HIDDEN_SIZE, np.float32) for row in pooled}
        return SectionResult(accepted, tokens.astype(np.int32), hidden=hidden)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()
