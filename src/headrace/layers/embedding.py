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
    """Token ids to hidden states. With a tied head, it reads its rows from the head's prepared weight."""

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
        self._weight = self.share.parameter(
            f"{name}.weight", hidden_size, vocab_size=vocab_size, dtype=dtype, device=device
        )
        self._table: Tensor | None = None
        self._tied: Head | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._weight,)

    def finish(self) -> None:
        if self._tied is None:
            self._table = self._weight.take()
        else:
            self._tied.prepare(self._weight.take())

    def tie(self, head: Head) -> None:
        """Give this embedding's table to `head`."""
        self._tied = head

    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], summed over ranks"""
        if self.parallel.size == 1:
            return self._rows(ids)
        local = ids - self.share.start
        mine = (local >= 0) & (local < self.share.num_rows)
        rows = self._rows(local.where(mine, 0)).masked_fill(~mine.unsqueeze(-1), 0)
        return self.parallel.collectives.all_reduce(rows)

    def _rows(self, ids: Tensor) -> Tensor:
        if self._tied is not None:
            return self._tied.rows(ids)
        assert self._table is not None, f"{self._weight.name} is not loaded"
        return F.embedding(ids, self._table)


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
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.recipe = recipe
        self.parallel = parallel
        self.scale = scale
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
        self.prepare(self._weight.take())

    def prepare(self, table: Tensor) -> None:
        """Take the weight: this head's own, or the embedding's that it is tied to."""
        self._prepared = self.recipe.prepare(table, None)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight. ids: [n] -> [n, hidden]"""
        return self.recipe.rows(self._ready(), ids)

    def __call__(self, act: Act) -> Tensor:
        """[rows, hidden] -> logits [rows, vocab], gathered over ranks: float32, on a GPU the product's own dtype"""
        # A GPU's product rounds to its dtype first anyway; the sampler widens the rows that need it.
        local = self.recipe.linear(act, self._ready(), out_dtype=None if act.data.is_cuda else torch.float32)
        logits = self.parallel.collectives.all_gather(local, -1)[:, : self.vocab_size]
        if self.scale != 1.0:
            logits = logits.float() * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits.float() / self.soft_cap)
        return logits

    def _ready(self) -> PreparedWeight:
        assert self._prepared is not None, f"{self.name} is not loaded"
        return self._prepared
