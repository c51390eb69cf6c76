"""Token counts for penalties: one int32 per vocabulary entry, only for slots that have penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.rows import to_device
from headrace.seam import Ints


class TokenCounts:
    """A pool of count rows that grows by doubling.

    An entry is 2 * (times generated) + (1 when the prompt has the token): the repetition penalty
    asks whether it is above 0, presence and frequency penalties ask for the half.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.pool = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [pool rows, vocab]
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        return len(self.pool) - len(self._free)

    def take(self, history: Ints, *, prompt_len: int, ignored: int) -> int:
        """A pool row filled from all tokens so far; the first `ignored` prompt tokens are left out.

        Ids outside the vocabulary (placeholders of other modalities) are never counted.
        """
        if not self._free:
            self._grow()
        row = self._free.pop()
        vocab_size = self.pool.shape[1]
        counts = 2 * _occurrences(history[prompt_len:], vocab_size)
        counts += _occurrences(history[ignored:prompt_len], vocab_size) > 0
        self.pool[row] = to_device(counts.astype(np.int32), self._device)
        return row

    def release(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)

    def gather(self, rows: Tensor, pending: Tensor | None = None) -> Tensor:
        """Counts [rows, vocab] as a copy, as if `pending` [rows, n] (padded with -1) had been generated too."""
        counts = self.pool.index_select(0, rows)
        if pending is not None:
            counts.scatter_add_(1, pending.clamp(min=0), (pending >= 0).int() * 2)
        return counts

    def add(self, rows: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        """Count generated tokens [rows, n] where `accepted` [rows, n] is true."""
        where = (rows[:, None].expand_as(tokens), tokens)
        self.pool.index_put_(where, accepted.int() * 2, accumulate=True)

    def _grow(self) -> None:
        old = self.pool
        size = max(1, 2 * len(old))
        self.pool = torch.zeros(size, old.shape[1], dtype=torch.int32, device=self._device)
        self.pool[: len(old)] = old
        self._free.extend(range(len(old), size))


def _occurrences(tokens: Ints, vocab_size: int) -> np.ndarray:
    inside = tokens[(tokens >= 0) & (tokens < vocab_size)]
    return np.bincount(inside, minlength=vocab_size)
