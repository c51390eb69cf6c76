"""What few slots have and no tensor column holds: bias, bans, sequence rules, the caller's processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.history import TokenHistory
from headrace.sampling.processors import Processor, lookup, run
from headrace.sampling.rows import to_device
from headrace.seam import SlotInit
from headrace.types import Sampling


@dataclass(slots=True)
class Specials:
    """The rare rules of one slot. A broken one has an `error` that fails its rows, and nobody else's."""

    request_id: int
    error: str = ""
    bias: tuple[Tensor, Tensor] | None = None  # ids int64 [n], values float32 [n]
    banned: Tensor | None = None  # int64 [n]
    words: tuple[tuple[int, ...], ...] = ()
    history: TokenHistory | None = None
    processors: tuple[Processor, ...] = ()

    @property
    def has_biases(self) -> bool:
        return self.bias is not None or self.banned is not None

    def shape(self, row: Tensor, pending: Sequence[int]) -> None:
        """Bias, bad words and repeated n-grams on one row of logits [vocab], in place; before the penalties."""
        if self.bias is not None:
            row.index_add_(0, *self.bias)
        if self.banned is not None:
            row.index_fill_(0, self.banned, -math.inf)
        self.ban_late(row, pending)

    def ban_late(self, row: Tensor, pending: Sequence[int]) -> None:
        """The share of `shape` that the tokens so far decide. Bans, so that it may come after the penalties too."""
        if self.history is None:
            return
        late = [*self.history.repeating(pending), *self.history.completing(self.words, pending)]
        late = [token for token in late if 0 <= token < len(row)]
        if late:
            row.index_fill_(0, to_device(np.array(late, dtype=np.int64), row.device), -math.inf)

    def process(self, row: Tensor, pending: Sequence[int]) -> str:
        """The caller's processors on one row of logits [vocab], in place; after the penalties. -> what failed."""
        assert self.history is not None
        return run(self.processors, row, [*self.history.tokens, *pending], request_id=self.request_id)


def is_special(sampling: Sampling) -> bool:
    return bool(
        sampling.logit_bias or sampling.bad_words or sampling.no_repeat_ngram_size > 0 or sampling.processors != 0
    )


def needs_late_tokens(sampling: Sampling) -> bool:
    """Whether a rule looks at sequences of tokens, so that the host must know the last ones."""
    return (
        sampling.no_repeat_ngram_size > 0
        or sampling.processors != 0
        or any(len(word) > 1 for word in sampling.bad_words)
    )


def build_specials(init: SlotInit, *, vocab_size: int, device: torch.device) -> Specials:
    """The rules of one slot; what the request gets wrong becomes `Specials.error`."""
    try:
        return _build(init, vocab_size=vocab_size, device=device)
    except ValueError as error:
        return Specials(init.request_id, error=str(error))


def _build(init: SlotInit, *, vocab_size: int, device: torch.device) -> Specials:
    sampling = init.sampling
    specials = Specials(init.request_id)
    if sampling.logit_bias:
        for token, value in sampling.logit_bias.items():
            _check_id("logit_bias", token, vocab_size)
            if math.isnan(value):
                raise ValueError(f"logit_bias: the bias of id {token} is not a number")
        ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.int64)
        values = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
        specials.bias = (to_device(ids, device), to_device(values, device))
    for word in sampling.bad_words:
        if not word:
            raise ValueError("bad_words: an empty token sequence; give at least one token id")
        _check_id("bad_words", word[-1], vocab_size)
    single = [word[0] for word in sampling.bad_words if len(word) == 1]
    if single:
        specials.banned = to_device(np.array(single, dtype=np.int64), device)
    specials.words = tuple(word for word in sampling.bad_words if len(word) > 1)
    if needs_late_tokens(sampling):
        assert init.history is not None, "sampling.needs_history: the plan carries all tokens so far"
        specials.history = TokenHistory(
            init.history.tolist(), prompt_len=init.prompt_len, ngram_size=sampling.no_repeat_ngram_size
        )
    if sampling.processors:
        specials.processors = lookup(sampling.processors)
    return specials


def _check_id(field: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ValueError(f"{field}: id {token} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})")
