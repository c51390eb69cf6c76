"""Tokens of one sequence to reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.params import SamplingParams
from headrace.server.parsers.port import CallEnd, Content, Event, OutputParser, Reasoning
from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopChecker
from headrace.text.stream import TextDelta
from headrace.text.tokenizer import Tokenizer
from headrace.types import FinishReason

__all__ = ["ParsedText"]


class ParsedText:
    """What `TextStream` is for plain text. Stop strings are looked for in the content, and in the reasoning on demand.

    Ids go in one by one, so that neither the events nor the count of reasoning tokens depend on how they came.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: OutputParser,
        params: SamplingParams,
        *,
        eos_ids: frozenset[int],
        shown_ids: frozenset[int] = frozenset(),
        one_call: bool = False,
        stops_thinking: bool = False,
    ) -> None:
        """`shown_ids`: special tokens that the parser wants to see. `one_call` ends the sequence with its first.
        `stops_thinking`: stop strings count in the reasoning, too."""
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            shown_ids=shown_ids,
        )
        self._parser = parser
        strings = params.stop_strings
        kinds = (Content, Reasoning) if stops_thinking else (Content,)
        self._stops: dict[type[Content] | type[Reasoning], StopChecker] = {
            kind: StopChecker(strings, include_stop_str=params.include_stop_str_in_output) for kind in kinds if strings
        }
        """By the kind of text that they are looked for in."""
        self._include_stop_str = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens or 0
        self._eos_ids = eos_ids
        self._one_call = one_call
        self._num_tokens = 0
        self._num_reasoning = 0
        self._events: list[Event] = []
        """Of the push under way."""
        self._has_ended = False
        """By a stop string or a call."""
        self._end: TextDelta | None = None

    def push(
        self, token_ids: Sequence[int], *, finish: FinishReason | None = None, stop_token: int | None = None
    ) -> TextDelta:
        """As `TextStream.push`; the events are those that these ids complete."""
        if self._end is not None:
            return self._end
        self._events, self._num_reasoning = [], 0
        num_shown = len(token_ids)
        if stop_token is not None and not self._include_stop_str:
            num_shown -= 1
        for index, token_id in enumerate(token_ids[:num_shown]):
            self._num_tokens += 1
            was_reasoning = self._parser.is_reasoning
            self._add(self._parser.push(self._detokenizer.push((token_id,))))
            self._num_reasoning += was_reasoning or self._parser.is_reasoning
            if self._has_ended:
                reason = finish if finish not in (None, "stop", "length") else "stop"
                return self._finished(reason, self._matched, index + 1)
        if finish is None:
            return self._delta(num_tokens_kept=len(token_ids))
        self._add([*self._parser.push(self._detokenizer.flush()), *self._parser.finish()])
        if not self._has_ended:
            self._flush()
        matched = self._matched
        if matched is not None and finish in ("stop", "length"):
            return self._finished("stop", matched, len(token_ids))
        return self._finished(finish, None if stop_token in self._eos_ids else stop_token, len(token_ids))

    def _add(self, events: list[Event]) -> None:
        for event in events:
            if self._has_ended:
                return
            kind = type(event)
            self._flush(but=kind)  # a stop string lies in one piece of text, not around what is between two
            if isinstance(event, Content | Reasoning) and kind in self._stops:
                stops = self._stops[type(event)]
                released, matched = stops.push(event.text, armed=self._num_tokens > self._min_tokens)
                self._show(type(event), released)
                self._has_ended = matched is not None
                continue
            self._events.append(event)
            self._has_ended = self._one_call and isinstance(event, CallEnd)

    @property
    def _matched(self) -> str | None:
        return next((stops.matched for stops in self._stops.values() if stops.matched is not None), None)

    def _flush(self, *, but: type[Event] | None = None) -> None:
        """Show what was held back, since it may have been the beginning of a stop string."""
        for kind, stops in self._stops.items():
            if kind is not but:
                self._show(kind, stops.flush())

    def _show(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _finished(self, reason: FinishReason, stop_reason: str | int | None, num_tokens_kept: int) -> TextDelta:
        self._end = TextDelta("", True, reason, stop_reason)
        return self._delta(True, reason, stop_reason, num_tokens_kept=num_tokens_kept)

    def _delta(
        self,
        finished: bool = False,
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        *,
        num_tokens_kept: int,
    ) -> TextDelta:
        text = "".join(event.text for event in self._events if isinstance(event, Content))
        return TextDelta(text, finished, reason, stop_reason, num_tokens_kept, self._events, self._num_reasoning)
