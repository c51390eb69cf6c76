"""Slot state on the device: the truth about every active sequence, and the block tables by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.staging import stage
from headrace.seam import FROM_DEVICE, Section, ints


class SlotState:
    """Tensors indexed by slot; the control half never reads them, it is told what a step accepted.

    `bound` is the host's copy of what a slot may have reached at most: kernels want maxima without
    asking the device.
    """

    def __init__(self, num_slots: int, *, num_groups: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.dummy = num_slots
        """The slot of rows that only pad a batch: always done, its blocks are the dummy block."""
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """Tokens whose KV is in the cache."""
        self.done = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        self.done[self.dummy] = True
        self.tables = [
            torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.bound = np.zeros(num_slots, np.int64)

    def apply(self, section: Section) -> None:
        """Slots that begin, and blocks that tables gained."""
        inits = ints([init.slot for init in section.inits])
        if not len(inits) and not any(len(triples) for triples in section.blocks):
            return
        slots, *changes = stage([inits, *(triples.T for triples in section.blocks)], self.device)
        if len(inits):
            self.done.index_fill_(0, slots, False)
            self.num_tokens.index_fill_(0, slots, 0)
        for table, change in zip(self.tables, changes, strict=True):
            if change.numel():
                table.index_put_((change[0], change[1]), change[2].int())

    def raise_bounds(self, section: Section) -> NDArray[np.int64]:
        """The most tokens that each row has in the cache after this step. [rows]"""
        slots, start = section.slot, section.start
        base = np.where(start == FROM_DEVICE, self.bound[slots], start)
        self.bound[slots] = base + section.num_tokens
        return self.bound[slots]

    def accept(self, slots: Tensor, tokens: Tensor, done: Tensor) -> None:
        """What sampling chose for the slots whose token the device decides."""
        self.last_token.index_copy_(0, slots, tokens)
        self.done.index_copy_(0, slots, done)

    def fail(self, slots: Sequence[int]) -> None:
        """A row's work failed: nothing more is accepted for its slot."""
        if slots:
            self.done.index_fill_(0, stage([ints(slots)], self.device)[0], True)
