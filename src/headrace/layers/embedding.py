"""Vocabulary-parallel embedding and head. Each rank holds an equal number of rows; the last are padded with zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act
from headrace.layers.weights import Parameter, Part, Slot
from headrace.quant.port import PreparedWeight, Recipe


class VocabShare:
    """The vocabulary rows of one rank: `num_rows` of them, those past the vocabulary zero."""

    def __init__(self, vocab_size: int, parallel: ParallelContext) -> None:
        self.num_rows = -(-vocab_size // parallel.size)
        self.start = min(parallel.rank * self.num_rows, vocab_size)
        self.stop = min(self.start + self.num_rows, vocab_size)

    def parameter(
        self, name: str, hidden_size: int, *, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> Parameter:
        slot = Slot("", (vocab_size, hidden_size), Part(0, self.start, self.stop))
        num_padding = self.num_rows - (self.stop - self.start)
        return Parameter(name, [slot], dtype=dtype, device=device, num_padding=num_padding)


class Embedding:
    """Token ids to hidden states."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        parallel: ParallelContext,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.share = VocabShare(vocab_size, parallel)
        self.dtype = dtype
        self._weight = self.share.parameter(
            f"{name}.weight", hidden_size, vocab_size=vocab_size, dtype=dtype, device=device
        )
        self._table: Tensor | None = None
        self._tied: list[Head] = []

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._weight,)

    def finish(self) -> None:
        self._table = self._weight.take()
        for head in self._tied:
            head.tie(self._table)

    def tie(self, head: Head) -> None:
        """Make `head` multiply with this embedding's table."""
        self._tied.append(head)

    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], summed over ranks"""
        assert self._table is not None, f"{self._weight.name} is not loaded"
        if self.parallel.size == 1:
            return F.embedding(ids, self._table)
        local = ids - self.share.start
        mine = (local >= 0) & (local < self.share.num_rows)
        rows = F.embedding(local.where(mine, 0), self._table)
        return self.parallel.collectives.all_reduce(rows.masked_fill(~mine.unsqueeze(-1), 0))


class Head:
    """Hidden states to logits."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        recipe: Recipe,
        parallel: ParallelContext,
        dtype: torch.dtype,
        device: torch.device,
        tied: bool,
        soft_cap: float | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.recipe = recipe
        self.parallel = parallel
        self.soft_cap = soft_cap
        self._weight: Parameter | None = None
        if not tied:
            share = VocabShare(vocab_size, parallel)
            self._weight = share.parameter(
                f"{name}.weight", hidden_size, vocab_size=vocab_size, dtype=dtype, device=device
            )
        self._prepared: PreparedWeight | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return () if self._weight is None else (self._weight,)

    def finish(self) -> None:
        assert self._weight is not None
        self._prepared = self.recipe.prepare(self._weight.take(), None)

    def tie(self, table: Tensor) -> None:
        self._prepared = self.recipe.prepare(table, None)

    def __call__(self, act: Act) -> Tensor:
        """[rows, hidden] -> float32 logits [rows, vocab], gathered over ranks"""
        assert self._prepared is not None, f"{self.name} is not loaded"
        local = self.recipe.linear(act, self._prepared)
        logits = self.parallel.collectives.all_gather(local, -1)[:, : self.vocab_size].float()
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits
