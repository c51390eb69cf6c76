"""Faults that can be planted into a world, each of which the simulation has to see."""

from __future__ import annotations

import random

from headrace.engine.fake import FakeEngine, Rank, Slot
from headrace.engine.fake_memory import NO_STAMP, Memory, Move
from headrace.seam import DEVICE, StepResult


class SwappedRows(FakeEngine):
    """Two rows get each other's tokens."""

    def collect(self) -> StepResult:
        result = super().collect()
        for rows in result.sections:
            if len(rows.tokens) > 1:
                rows.tokens[:2] = rows.tokens[1::-1].copy()
        return result


class ForgetfulMemory(Memory):
    def _copy_block(self, move: Move) -> None:
        if move.stamp != NO_STAMP or random.Random(move.id).random() < 0.5:
            super()._copy_block(move)


class LosesCopies(FakeEngine):
    """Half of the copies are reported and not done."""

    memory_class = ForgetfulMemory


class DisorderlyMemory(Memory):
    def before_write(self, place: tuple[int, int, int]) -> None:
        """A copy's source may be overwritten before it is done."""


class CopiesAfterWriters(FakeEngine):
    memory_class = DisorderlyMemory


class TrustingMemory(Memory):
    def accepts_stamp(self, group: int, block: int, stamp: int) -> bool:
        return int(self.disk.stamps[group][block]) != NO_STAMP


class AcceptsAnyStamp(FakeEngine):
    """A block of another life is read from disk all the same."""

    memory_class = TrustingMemory


class RestoresAnother(FakeEngine):
    """Of two snapshots at the same position, the wrong one."""

    def restore(self, rank: Rank, slot: Slot, group: int, block: int) -> None:
        super().restore(rank, slot, group, block)
        state, seen = slot.states[group]
        for other, others_seen in rank.memory.tiers[DEVICE][group].tolist():
            if others_seen == seen and other != state:
                slot.states[group] = other, seen
                return
