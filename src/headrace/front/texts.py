"""How a choice gets its text: as it arrives, at its end, or not at all. Off and late are objects, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from headrace.params import SamplingParams
from headrace.text.stream import TextDelta, TextStream
from headrace.text.tokenizer import Tokenizer
from headrace.types import FinishReason

__all__ = ["Text", "text_for"]


class Text(Protocol):
    """What `TextStream` does."""

    def push(
        self, token_ids: Sequence[int], *, finish: FinishReason | None = None, stop_token: int | None = None
    ) -> TextDelta: ...


_NOTHING = TextDelta("", num_tokens_kept=0)


class _NoText:
    """For callers that want ids."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids

    def push(
        self, token_ids: Sequence[int], *, finish: FinishReason | None = None, stop_token: int | None = None
    ) -> TextDelta:
        if finish is None:
            return _NOTHING if len(token_ids) == 1 else TextDelta("", num_tokens_kept=len(token_ids))
        reason = None if stop_token in self._eos_ids else stop_token
        return TextDelta("", True, finish, reason, len(token_ids))


class _WholeText:
    """Decodes once, at the end: for callers that wait for it, without stop strings to look for."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, eos_ids: frozenset[int], token_ids: list[int]
    ) -> None:
        """`token_ids` is the choice's own list; ids of the last push are not in it yet."""
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids = token_ids
        self._end = _NoText(eos_ids)

    def push(
        self, token_ids: Sequence[int], *, finish: FinishReason | None = None, stop_token: int | None = None
    ) -> TextDelta:
        end = self._end.push(token_ids, finish=finish, stop_token=stop_token)
        if finish is None:
            return end
        hides_last = stop_token is not None and not self._params.include_stop_str_in_output
        text = self._tokenizer.decode(
            [*self._token_ids, *(token_ids[:-1] if hides_last else token_ids)],
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )
        return TextDelta(text, True, finish, end.stop_reason, end.num_tokens_kept)


class _HiddenText:
    """Looks for stop strings and shows nothing."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def push(
        self, token_ids: Sequence[int], *, finish: FinishReason | None = None, stop_token: int | None = None
    ) -> TextDelta:
        return replace(self._text.push(token_ids, finish=finish, stop_token=stop_token), text="")


def text_for(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    eos_ids: frozenset[int],
    streaming: bool,
    token_ids: list[int],
) -> Text:
    """The cheapest way that serves the caller. `eos_ids` end a sequence without being a stop reason."""
    stops = params.stop_strings
    if tokenizer is None or not (params.detokenize or stops):
        return _NoText(eos_ids)
    if not (streaming or stops):
        return _WholeText(tokenizer, params, eos_ids, token_ids)
    stream = TextStream(
        tokenizer,
        stop_strings=stops,
        include_stop_str=params.include_stop_str_in_output,
        min_tokens=params.min_tokens or 0,
        eos_ids=eos_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return stream if params.detokenize else _HiddenText(stream)
