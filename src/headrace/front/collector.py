"""One user request on its way back: tokens become text, choices find their end, the best are chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import structs

from headrace.front.outputs import Finish, TokenUsage
from headrace.front.texts import Text, text_for
from headrace.params import SamplingParams
from headrace.text.stream import TextDelta
from headrace.text.tokenizer import Tokenizer
from headrace.types import Delta, FinishReason, Logprobs, Request, RequestTimes

__all__ = ["BeamReceiver", "Choice", "Collector", "Observer"]

FINISHES: dict[FinishReason, Finish] = {
    "stop": "stop",
    "length": "length",
    "timeout": "timeout",
    "abort": "cancelled",
    "error": "cancelled",
}


class Observer(Protocol):
    """Who counts. Called by the thread that dispatches, or by the one that ends a request."""

    def began(self, choice: Choice) -> None:
        """Its first token is there."""
        ...

    def ended(self, choice: Choice) -> None:
        """Once, whatever the reason."""
        ...


class _Nobody:
    def began(self, choice: Choice) -> None:
        pass

    def ended(self, choice: Choice) -> None:
        pass


NewText = Callable[[SamplingParams, frozenset[int]], Text]

NOBODY: Observer = _Nobody()


class Choice:
    """One sequence. Its first reason to end wins; whatever comes later is not added."""

    __slots__ = (
        "_text",
        "collector",
        "cumulative_logprob",
        "events",
        "finish",
        "index",
        "logits",
        "logprobs",
        "num_generated",
        "num_reasoning",
        "parts",
        "request_id",
        "stop_reason",
        "times",
        "token_ids",
    )

    def __init__(self, collector: Collector, request_id: int, index: int) -> None:
        self.collector = collector
        self.request_id = request_id
        self.index = index
        self.token_ids: list[int] = []
        self.parts: list[str] = []
        """The text in the pieces that it came in."""
        self.events: list[Any] = []
        """Reasoning, content and calls (server/parsers) of an output that is told apart; `parts` is the content."""
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.num_generated = 0
        """Tokens computed, those included that are not shown."""
        self.num_reasoning = 0
        """How many of them belong to the reasoning, as far as the output is told apart."""
        self.logits: list[Any] = []
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None
        self.times: RequestTimes | None = None
        """As far as they are known: from the first token on."""
        self._text = collector.text_for(self.token_ids)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add_token(self, token: int) -> None:
        """The common step: one token, which ends nothing by itself."""
        if self.finish is not None or self.collector.drops_output:
            return
        text = self._text.push((token,))
        self.token_ids.append(token)
        self.num_generated += 1
        if text.events or text.num_reasoning:
            self._take_events(text)
        if text.text:
            self.parts.append(text.text)
        if text.finished:
            self._close("stop", text.stop_reason)

    def apply(self, delta: Delta) -> None:
        """Everything else: several tokens, log-probabilities, the end."""
        collector = self.collector
        collector.note(self, delta)
        self.times = delta.times or self.times
        if self.finish is not None:
            return
        if collector.drops_output:
            self._close("length", None)
            return
        text = self._text.push(delta.tokens, finish=delta.finish, stop_token=delta.stop_token)
        was_empty = self.num_generated == 0
        self._take(delta, text)
        if was_empty and self.num_generated:
            collector.observer.began(self)
        self._take_events(text)
        if text.text:
            self.parts.append(text.text)
        if text.finished:
            assert text.finish_reason is not None
            self._close(FINISHES[text.finish_reason], text.stop_reason)

    def cancel(self) -> None:
        """End it from this side, with the text that was still held back."""
        if self.finish is None:
            text = self._text.push((), finish="abort")
            self._take_events(text)
            if text.text:
                self.parts.append(text.text)
            self._close("cancelled", None)

    def _take(self, delta: Delta, text: TextDelta) -> None:
        """The tokens that belong to the output: a stop id only if the caller wants to see it, an EOS token always."""
        kept = text.num_tokens_kept if text.finished else len(delta.tokens)
        self.num_generated += kept
        if isinstance(text.stop_reason, int) and not self.collector.params.include_stop_str_in_output:
            kept -= 1
        self.token_ids += delta.tokens[:kept]
        self.logprobs += delta.logprobs[:kept]
        self.cumulative_logprob += sum(entry.values[0] for entry in delta.logprobs[:kept])
        if delta.logits is not None:
            self.logits.append(delta.logits)

    def _take_events(self, text: TextDelta) -> None:
        self.events += text.events
        self.num_reasoning += text.num_reasoning

    def _close(self, finish: Finish, stop_reason: int | str | None) -> None:
        self.finish, self.stop_reason = finish, stop_reason
        if isinstance(stop_reason, str) and self.times is not None:  # of this end the runtime hears from here
            self.times = structs.replace(self.times, last_token_s=time.monotonic())
        self.collector.num_open -= 1
        self.collector.observer.ended(self)


class BeamReceiver:
    """The one sequence that the runtime sees of a beam search: its end fills all choices."""

    __slots__ = ("collector", "request_id")

    def __init__(self, collector: Collector, request_id: int) -> None:
        self.collector = collector
        self.request_id = request_id

    def add_token(self, token: int) -> None:
        raise AssertionError("a beam search brings its tokens at the end")

    def apply(self, delta: Delta) -> None:
        collector = self.collector
        collector.note(collector.choices[0], delta)
        beams = delta.beams or []
        for choice, beam in zip(list(collector.choices), beams):
            choice.apply(
                Delta(
                    id=delta.id,
                    tokens=beam.tokens,
                    logprobs=beam.logprobs if collector.params.logprobs is not None else [],
                    finish=beam.finish,
                    stop_token=beam.stop_token,
                    times=delta.times,
                )
            )
            choice.cumulative_logprob = beam.cumulative_logprob
        if delta.finish is not None:
            for choice in collector.choices[len(beams) :]:
                choice.cancel()


class Collector:
    """All sequences of one prompt. Whoever dispatches calls it from one thread at a time."""

    def __init__(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        streaming: bool,
        owner: Any = None,
        new_text: NewText | None = None,
    ) -> None:
        """`params` as `RequestBuilder.build` resolved them; `owner` is the caller's own, for when something came.

        `new_text` makes each choice's text of the parameters and the EOS ids, in place of the usual kinds.
        """
        first = requests[0]
        self.params = params
        self.owner = owner
        self.observer = NOBODY
        self.first = first
        eos_ids = frozenset(first.stop_ids) - frozenset(params.stop_token_ids or ())

        def text(token_ids: list[int]) -> Text:
            if new_text is not None:
                return new_text(params, eos_ids)
            return text_for(params, tokenizer, eos_ids=eos_ids, streaming=streaming, token_ids=token_ids)

        self.text_for = text
        """Makes the text of a new choice that fills the token ids it is given."""
        self.receivers: list[Choice | BeamReceiver] = []
        self.cached_tokens = 0
        self.embedding = b""
        """float32 [hidden], of a request with `pooling`."""
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.error = ""
        self.error_param = ""
        """The caller's field that the error is about; "" when the caller is not at fault."""
        self.choices: list[Choice] = []
        count = len(requests) if first.beam is None else first.beam.num_return
        for index in range(count):
            request_id = requests[index].id if first.beam is None else first.id
            self.choices.append(Choice(self, request_id, index))
        self.receivers = [*self.choices] if first.beam is None else [BeamReceiver(self, first.id)]
        self.num_open = count

    @property
    def prompt(self) -> list[int]:
        return self.first.prompt

    @property
    def arrival_s(self) -> float:
        return self.first.arrival_s

    @property
    def drops_output(self) -> bool:
        """A request for no tokens computes one, for the prompt's log-probabilities."""
        return self.params.max_tokens == 0

    @property
    def is_done(self) -> bool:
        return self.num_open == 0

    @property
    def request_ids(self) -> list[int]:
        return [receiver.request_id for receiver in self.receivers]

    def note(self, choice: Choice, delta: Delta) -> None:
        """Facts of the whole request that any of its deltas may bring."""
        if delta.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.embedding = delta.embedding or self.embedding
        if choice.index == 0:
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        # What a pin is for is to be kept: otherwise it has failed, however many tokens it has.
        failed = delta.finish == "error" or (bool(self.first.pin) and delta.finish is not None and bool(delta.error))
        if failed and choice.finish is None:
            self.error_param = delta.param
            self.fail(delta.error or "the request failed in the runtime")

    def fail(self, message: str) -> None:
        """One sequence's fault is the request's; the others end with it."""
        if not self.is_done:
            self.error = message
            self.cancel()

    def cancel(self) -> None:
        for choice in self.choices:
            choice.cancel()

    def best(self) -> list[Choice]:
        """The choices to return, of a finished request: all, or the `n` likeliest of `best_of`, renumbered."""
        if len(self.choices) == self.params.n:
            return self.choices
        ranked = sorted(self.choices, key=lambda choice: -choice.cumulative_logprob)[: self.params.n]
        for index, choice in enumerate(ranked):
            choice.index = index
        return ranked

    def usage(self) -> TokenUsage:
        completion = sum(choice.num_generated for choice in self.choices)
        reasoning = sum(choice.num_reasoning for choice in self.choices)
        return TokenUsage(len(self.prompt), completion, self.cached_tokens, reasoning_tokens=reasoning)
