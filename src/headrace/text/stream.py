"""Tokens of one sequence to the text that its reader sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopChecker
from headrace.text.tokenizer import Tokenizer
from headrace.types import FinishReason

__all__ = ["TextDelta", "TextStream"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one `push` adds to the text."""

    text: str
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token id, that ended the sequence; None for EOS and every other end."""
    num_tokens_kept: int = 0
    """How many of the pushed ids belong to the output: all, or those up to the one that completed a stop string."""
    events: Sequence[Any] = ()
    """Where the output is told apart into reasoning, content and calls: what came (server/parsers). `text` is the
    content then."""
    num_reasoning: int = 0
    """How many of the pushed ids belong to the reasoning."""


class TextStream:
    """Detokenises one sequence and ends it at a stop string.

    A stop string may end the sequence from generated token `min_tokens + 1` on, and must lie in the text of tokens from
    there on. A stop token's own text is left out unless `include_stop_str`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Iterable[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        strings = tuple(stop_strings)
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._stops = StopChecker(strings, include_stop_str=include_stop_str) if strings else None
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._eos_ids = eos_ids
        self._num_tokens = 0
        self._end: TextDelta | None = None

    @property
    def finished(self) -> bool:
        return self._end is not None

    def push(
        self, token_ids: Sequence[int], *, finish: FinishReason | None = None, stop_token: int | None = None
    ) -> TextDelta:
        """The text that these ids complete. With `finish` it is the rest of the text.

        `stop_token` is the stop id that ended the sequence, the last of `token_ids` then. A stop string found in the
        same push as the end wins over reasons `stop` and `length`. After the end, pushes are empty and repeat it.
        """
        if self._end is not None:
            return self._end
        assert stop_token is None or (finish is not None and token_ids[-1] == stop_token)
        num_shown = len(token_ids)
        if stop_token is not None and not self._include_stop_str:
            num_shown -= 1
        text, num_kept = self._text_of(token_ids[:num_shown], is_last=finish is not None)
        matched = self._stops.matched if self._stops else None
        if matched is not None:
            reason = finish if finish not in (None, "stop", "length") else "stop"
            return self._finish(text, reason, matched, num_kept)
        if finish is None:
            return TextDelta(text, num_tokens_kept=len(token_ids))
        stop_reason = None if stop_token in self._eos_ids else stop_token
        return self._finish(text, finish, stop_reason, len(token_ids))

    def _finish(
        self, text: str, reason: FinishReason, stop_reason: str | int | None, num_tokens_kept: int
    ) -> TextDelta:
        self._end = TextDelta("", True, reason, stop_reason)
        return TextDelta(text, True, reason, stop_reason, num_tokens_kept)

    def _text_of(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, int]:
        """(text to give out, ids up to the one that completed a stop string, or all)."""
        if self._stops is None:
            self._num_tokens += len(token_ids)
            text = self._detokenizer.push(token_ids)
            return text + self._detokenizer.flush() if is_last else text, len(token_ids)
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):  # one at a time, to know which token completes a match
            self._num_tokens += 1
            delta = self._detokenizer.push((token_id,))
            released, matched = self._stops.push(delta, armed=self._num_tokens > self._min_tokens)
            parts.append(released)
            if matched is not None:
                return "".join(parts), index + 1
        if is_last:
            delta = self._detokenizer.flush()
            released, _ = self._stops.push(delta, armed=self._num_tokens > self._min_tokens)
            parts += [released, self._stops.flush()]
        return "".join(parts), len(token_ids)
