"""One user request on its way back: tokens become text, choices find their end, the best are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.front.outputs import Finish, TokenUsage
from headrace.front.texts import Text, text_for
from headrace.params import SamplingParams
from headrace.text.stream import TextDelta
from headrace.text.tokenizer import Tokenizer
from headrace.types import Delta, FinishReason, Logprobs, Request, RequestTimes

__all__ = ["BeamReceiver", "Choice", "Collector"]

FINISHES: dict[FinishReason, Finish] = {
    "stop": "stop",
    "length": "length",
    "timeout": "timeout",
    "abort": "cancelled",
    "error": "cancelled",
}


class Choice:
    """One sequence. Its first reason to end wins; whatever comes later is not added."""

    __slots__ = (
        "_text",
        "collector",
        "cumulative_logprob",
        "finish",
        "index",
        "logits",
        "logprobs",
        "num_generated",
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
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.num_generated = 0
        """Tokens computed, those included that are not shown."""
        self.logits: list[Any] = []
        self.finish: Finish | None = None
        self.stop_reason: int | str | None = None
        self.times: RequestTimes | None = None
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
        self._take(delta, text)
        if text.text:
            self.parts.append(text.text)
        if text.finished:
            assert text.finish_reason is not None
            self._close(FINISHES[text.finish_reason], text.stop_reason)

    def cancel(self) -> None:
        """End it from this side, with the text that was still held back."""
        if self.finish is None:
            text = self._text.push((), finish="abort")
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

    def _close(self, finish: Finish, stop_reason: int | str | None) -> None:
        self.finish, self.stop_reason = finish, stop_reason
        self.collector.num_open -= 1


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
    ) -> None:
        """`params` as `RequestBuilder.build` resolved them; `owner` is the caller's own, for when something came."""
        first = requests[0]
        self.params = params
        self.owner = owner
        self._tokenizer = tokenizer
        self._streaming = streaming
        self._eos_ids = frozenset(first.stop_ids) - frozenset(params.stop_token_ids or ())
        self.prompt = first.prompt
        self.receivers: list[Choice | BeamReceiver] = []
        self.drops_output = params.max_tokens == 0
        """A request for no tokens computes one, for the prompt's log-probabilities."""
        self._is_pin = bool(first.pin)
        """What it is for is the pin: without one it has failed, however many tokens it has."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.error = ""
        self.choices: list[Choice] = []
        count = len(requests) if first.beam is None else first.beam.num_return
        for index in range(count):
            request_id = requests[index].id if first.beam is None else first.id
            self.choices.append(Choice(self, request_id, index))
        self.receivers = [*self.choices] if first.beam is None else [BeamReceiver(self, first.id)]
        self.num_open = count

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
        if choice.index == 0:
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        failed = delta.finish == "error" or (self._is_pin and delta.finish is not None and bool(delta.error))
        if failed and choice.finish is None:
            self.fail(delta.error or "the request failed in the runtime")

    def fail(self, message: str) -> None:
        """One sequence's fault is the request's; the others end with it."""
        if not self.is_done:
            self.error = message
            self.cancel()

    def cancel(self) -> None:
        for choice in self.choices:
            choice.cancel()

    def text_for(self, token_ids: list[int]) -> Text:
        """The text of a new choice that fills `token_ids`."""
        return text_for(
            self.params, self._tokenizer, eos_ids=self._eos_ids, streaming=self._streaming, token_ids=token_ids
        )

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
        return TokenUsage(len(self.prompt), completion, self.cached_tokens)
