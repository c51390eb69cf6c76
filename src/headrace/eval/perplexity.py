"""Perplexity of a text.

The text is encoded once, as a whole. Windows of at most `length` tokens begin at 0, stride, 2 * stride ...; a token is
scored in the first window that holds it together with a token before it, given all tokens before it in that window.

    perplexity = exp(-(sum of log-probabilities) / (number of scored tokens))

`sliding` (stride < length) scores every token but the text's first one, each with at least length - stride tokens
before it, the first window's apart. `blocked` (stride = length) is cheaper and higher: windows don't overlap, and the
first token of each isn't scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.eval.port import Model, Scored, Span

__all__ = ["Perplexity", "Window", "measure_perplexity", "windows"]


class Window(NamedTuple):
    """Tokens `begin` to `end` of the text, of which those from `first` on are scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Of one text. A window is a unit of comparison: its tokens' log-probabilities are not independent."""

    logprob_sums: list[float]
    """By window, in nats."""
    counts: list[int]
    """By window, scored tokens."""
    num_bytes: int
    """Of the text in UTF-8."""

    @property
    def num_scored(self) -> int:
        return sum(self.counts)

    @property
    def value(self) -> float:
        return math.exp(-sum(self.logprob_sums) / self.num_scored)

    @property
    def bits_per_byte(self) -> float:
        """Of the scored tokens, over all of the text's bytes."""
        return -sum(self.logprob_sums) / math.log(2) / self.num_bytes


def windows(num_tokens: int, *, length: int, stride: int) -> Iterator[Window]:
    """Raises ValueError: sizes that leave tokens out, or nothing to score."""
    if length < 2:
        raise ValueError(f"--length is {length}: a window needs 2 tokens")
    if not 1 <= stride <= length:
        raise ValueError(f"--stride is {stride} and --length {length}: it must be 1 to --length")
    if num_tokens < 2:
        raise ValueError("TEXT has fewer than 2 tokens: give a longer one")
    scored_to = 1
    for begin in range(0, num_tokens, stride):
        end = min(begin + length, num_tokens)
        first = max(begin + 1, scored_to)
        if first < end:
            yield Window(begin, first, end)
            scored_to = end
        if end == num_tokens:
            return


def measure_perplexity(
    model: Model, text: str, *, length: int | None = None, stride: int | None = None, max_windows: int = 0
) -> Perplexity:
    """Sliding or blocked, as the sizes say.

    Args:
        length: of a window; None is the longest that the model takes, at most 2048.
        stride: between windows; None is half of `length`.
        max_windows: from the beginning; 0 is all.

    Raises:
        ValueError: a text or sizes that leave nothing to score.
    """
    length = min(model.max_len, 2048) if length is None else length
    if length > model.max_len:
        raise ValueError(f"--length is {length} and the model takes {model.max_len}: lower it, or raise max_seq_len")
    ids = model.encode(text)
    found = list(windows(len(ids), length=length, stride=max(length // 2, 1) if stride is None else stride))
    found = found[:max_windows] if max_windows else found
    scored = model.score(
        [Span(ids[each.begin : each.end], each.first - each.begin) for each in found], label="perplexity"
    )
    num_bytes = len(text.encode()) if found[-1].end == len(ids) else len(model.decode(ids[: found[-1].end]).encode())
    return Perplexity(
        logprob_sums=[_sum(each) for each in scored], counts=[len(each) for each in scored], num_bytes=num_bytes
    )


def _sum(tokens: Sequence[Scored]) -> float:
    return math.fsum(token.logprob for token in tokens)
