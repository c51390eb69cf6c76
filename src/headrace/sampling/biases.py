"""Biases and bans of tokens on the device, for kernels that ask by slot: a pool of lists that grows by doubling."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.rows import to_device
from headrace.types import Sampling


class TokenBiases:
    """Each list is a row: ids padded with -1, and what is added to their logits; minus infinity bans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ids = torch.full((0, 1), -1, dtype=torch.int64, device=device)  # [pool rows, longest list]
        self.values = torch.zeros((0, 1), dtype=torch.float32, device=device)
        self._free: list[int] = []

    def take(self, sampling: Sampling) -> int:
        """A pool row with the bias and the single bad words, which must be ids of the vocabulary."""
        merged = {int(token): float(value) for token, value in sampling.logit_bias.items()}
        merged |= {word[0]: -math.inf for word in sampling.bad_words if len(word) == 1}
        self._reserve(len(merged))
        row = self._free.pop()
        ids = np.full(self.ids.shape[1], -1, dtype=np.int64)
        values = np.zeros(self.ids.shape[1], dtype=np.float32)
        ids[: len(merged)], values[: len(merged)] = list(merged), list(merged.values())
        self.ids[row].copy_(to_device(ids, self._device))
        self.values[row].copy_(to_device(values, self._device))
        return row

    def release(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)

    def _reserve(self, length: int) -> None:
        """Room for one more list of this length; in new memory when there was none."""
        num_rows, width = self.ids.shape
        size = num_rows if self._free else max(4, 2 * num_rows)
        while width < length:
            width *= 2
        if (size, width) == self.ids.shape:
            return
        self.ids = _grown(self.ids, (size, width), fill=-1)
        self.values = _grown(self.values, (size, width), fill=0)
        self._free.extend(range(num_rows, size))


def _grown(old: Tensor, shape: tuple[int, int], *, fill: int) -> Tensor:
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new[: old.shape[0], : old.shape[1]] = old
    return new
