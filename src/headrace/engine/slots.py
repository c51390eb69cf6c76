"""Slot state on the device: the truth about every active sequence, and the block tables by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.seam import FROM_DEVICE, Ints, Section


class SlotState:
    """Tensors indexed by slot; the control half never reads them, it is told what a step accepted.

    `bound` is the host's copy of what a slot may have reached at most: kernels want maxima without
    asking the device.
    """

    def __init__(self, num_slots: int, *, num_groups: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Tokens whose KV is in the cache."""
        self.done = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.tables = [
            torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.bound = np.zeros(num_slots, np.int64)

    def apply(self, section: Section) -> None:
        """Slots that begin, and blocks that tables gained."""
        if section.inits:
            slots = torch.tensor([init.slot for init in section.inits], device=self.device)
            self.done[slots] = False
            self.num_tokens[slots] = 0
        for table, triples in zip(self.tables, section.blocks, strict=True):
            if len(triples):
                changes = torch.from_numpy(np.ascontiguousarray(triples.T)).to(self.device)
                table[changes[0].long(), changes[1].long()] = changes[2]

    def raise_bounds(self, section: Section) -> NDArray[np.int64]:
        """The most tokens that each row has in the cache after this step. [rows]"""
        slots, start = section.slot, section.start
        base = np.where(start == FROM_DEVICE, self.bound[slots], start)
        self.bound[slots] = base + section.num_tokens
        return self.bound[slots]

    def accept(self, slots: Tensor, tokens: Tensor, done: Tensor) -> None:
        """What sampling chose for the slots whose token the device decides."""
        self.last_token[slots] = tokens
        self.done[slots] = done

    def fail(self, slots: Sequence[int]) -> None:
        """A row's work failed: nothing more is accepted for its slot."""
        if slots:
            self.done[torch.tensor(slots, device=self.device)] = True


def as_device(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
