"""One user request on its way back: tokens become text, choices find their end, the best are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.front.outputs import Finish, TokenUsage
from headrace.front.pieces import Pieces, pieces_for
from headrace.params import SamplingParams
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
        "_pieces",
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

    def __init__(self, collector: Collector, request_id: int, index: int, pieces: Pieces) -> None:
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
        self._pieces = pieces

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add_token(self, token: int) -> None:
        """The common step: one token, which ends nothing by itself."""
        if self.finish is not None or self.collector.drops_output:
            return
        self.token_ids.append(token)
        self.num_generated += 1
        part = self._pieces.push(token)
        if part:
            self.parts.append(part)
        if self._pieces.stopped is not None:
            self.end("stop", stop_reason=self._pieces.stopped)

    def apply(self, delta: Delta) -> None:
        """Everything else: several tokens, log-probabilities, the end."""
        collector = self.collector
        collector.note(self, delta)
        if delta.times is not None:
            self.times = delta.times
        if self.finish is not None:
            return
        if collector.drops_output:
            self.end("length")
            return
        shown = delta.tokens
        if delta.stop_token is not None:
            assert delta.tokens[-1] == delta.stop_token
            shown = delta.tokens[:-1]
        if delta.logits is not None:
            self.logits.append(delta.logits)
        for at, token in enumerate(shown):
            if delta.logprobs:
                self._add_logprobs(delta.logprobs[at])
            self.add_token(token)
            if self.finish is not None:
                return
        if delta.stop_token is not None:
            self._add_stop_token(delta)
        if delta.finish is not None:
            self.end(FINISHES[delta.finish], stop_reason=collector.stop_reason(delta.stop_token))

    def end(self, finish: Finish, *, stop_reason: int | str | None = None) -> None:
        if self.finish is not None:
            return
        rest = self._pieces.finish()
        if rest:
            self.parts.append(rest)
        if self._pieces.stopped is not None and finish != "stop":
            finish, stop_reason = "stop", self._pieces.stopped
        self.finish, self.stop_reason = finish, stop_reason
        self.collector.num_open -= 1

    def _add_logprobs(self, entry: Logprobs) -> None:
        self.logprobs.append(entry)
        self.cumulative_logprob += entry.values[0]

    def _add_stop_token(self, delta: Delta) -> None:
        """An EOS token stays among the ids, a stop id only if the caller wants it; neither makes text of its own."""
        assert delta.stop_token is not None
        params = self.collector.params
        self.num_generated += 1
        if params.include_stop_str_in_output:
            part = self._pieces.push(delta.stop_token)
            if part:
                self.parts.append(part)
        elif delta.stop_token in (params.stop_token_ids or ()):
            return
        self.token_ids.append(delta.stop_token)
        if delta.logprobs:
            self._add_logprobs(delta.logprobs[-1])


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
                choice.end(FINISHES[delta.finish])


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
        self.prompt = first.prompt
        self.receivers: list[Choice | BeamReceiver] = []
        self.drops_output = params.max_tokens == 0
        """A request for no tokens computes one, for the prompt's log-probabilities."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.error = ""
        self.choices: list[Choice] = []
        count = len(requests) if first.beam is None else first.beam.num_return
        for index in range(count):
            request_id = requests[index].id if first.beam is None else first.id
            pieces = pieces_for(params, tokenizer, streaming=streaming)
            self.choices.append(Choice(self, request_id, index, pieces))
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
        if delta.finish == "error" and choice.finish is None:
            self.fail(delta.error or "the request failed in the runtime")

    def fail(self, message: str) -> None:
        """One sequence's fault is the request's; the others end with it."""
        if not self.is_done:
            self.error = message
            self.cancel()

    def cancel(self) -> None:
        for choice in self.choices:
            choice.end("cancelled")

    def stop_reason(self, stop_token: int | None) -> int | None:
        """A stop id that the caller gave is a reason; an EOS token is not."""
        return stop_token if stop_token in (self.params.stop_token_ids or ()) else None

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
