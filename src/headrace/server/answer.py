"""What one HTTP request is answered with: the facts that all its pieces share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.server.logprobs import prompt_logprobs
from headrace.server.parsers.port import Content, Event
from headrace.server.timing import timing_of
from headrace.server.tools import ToolUse
from headrace.text.tokenizer import Tokenizer

__all__ = ["Answer", "Api", "Route", "Shown", "UsageShown", "finish_name", "tokens_body", "usage_body"]


class Api(NamedTuple):
    """One of the APIs that a request may be of."""

    prefix: str
    """Of its answers' ids."""
    writer: Callable[[Answer], Route]
    prompt: str = "messages"
    """The body's field that the prompt comes from, for errors."""
    has_free_ids: bool = False
    """An answer may be called as the client calls its request."""
    operation: str = "chat"
    """As OpenTelemetry's conventions call it (`gen_ai.operation.name`)."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What an answer tells of its tokens, beside their text."""

    ids: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens at each position; None shows no log-probabilities."""
    prompt_logprobs: bool = False
    echo: Sequence[str] | None = None
    """The prompts' texts, to be put before each choice's."""

    @property
    def of_tokens(self) -> bool:
        """Something goes with each token."""
        return self.ids or self.logprobs is not None


@dataclass(frozen=True, kw_only=True)
class UsageShown:
    """Where an answer tells of its usage; one that isn't streamed always does."""

    at_end: bool = False
    """In a chunk of its own behind the last choice."""
    in_pieces: bool = False
    timing: bool = False
    """It tells where the time went."""


@dataclass(kw_only=True)
class Answer:
    """Of one HTTP request; choice `index` of prompt `p` is number `p * n + index` of the response."""

    api: Api
    model: str
    n: int = 1
    tokenizer: Tokenizer | None = None
    """None only where nothing needs a token's name."""
    stream: bool = False
    stream_interval: int = 1
    shown: Shown = Shown()
    usage: UsageShown = UsageShown()
    failure_status: int = 500
    """Of a request that the runtime could not finish."""
    has_parser: bool = False
    """Choices have events (server/parsers/port.py); otherwise all text is content."""
    tool_use: ToolUse = field(default_factory=ToolUse)
    client_id: str = ""
    """What the client calls its request."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        free_id = self.client_id if self.api.has_free_ids else ""
        self.id = self.id or free_id or self.api.prefix + uuid.uuid4().hex

    @property
    def operation(self) -> str:
        return self.api.operation

    @property
    def label(self) -> str:
        """What logs call it."""
        return self.id if self.client_id in ("", self.id) else f"{self.id} ({self.client_id})"

    def total_usage(self, collectors: Sequence[Collector]) -> TokenUsage:
        total = TokenUsage(0, 0, 0)
        for collector in collectors:
            total = total + collector.usage()
        return replace(total, timing=timing_of(collectors)) if self.usage.timing else total

    def events(self, choice: Choice, *, parts_from: int = 0, events_from: int = 0) -> Sequence[Event]:
        """Reasoning, content and calls of a choice since then."""
        if self.has_parser:
            return choice.events[events_from:]
        text = "".join(choice.parts[parts_from:])
        return [Content(text)] if text else []


class Route(Protocol):
    """How one of the APIs writes an answer; `prompt` is the number of the prompt that a choice belongs to."""

    def response(self, collectors: Sequence[Collector]) -> bytes:
        """The whole body, of finished requests."""
        ...

    def opening(self, choice: Choice, prompt: int) -> bytes:
        """What a stream says before a choice's first piece."""
        ...

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        """What a choice got since then; empty when there is nothing to show."""
        ...

    def end(self, choice: Choice, prompt: int) -> bytes:
        """A choice's last piece, with its finish reason."""
        ...

    def closing(self, usage: TokenUsage) -> bytes:
        """How a stream ends, after all choices."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """How a stream ends that has begun and can't go on."""
        ...


def finish_name(choice: Choice) -> str:
    assert choice.finish is not None
    return choice.finish


def tokens_body(answer: Answer, choice: Choice) -> dict[str, Any]:
    """What an answer of one choice tells of its tokens, in fields beside its own."""
    collector, body = choice.collector, dict[str, Any]()
    if answer.shown.ids:
        body |= {"prompt_token_ids": collector.prompt, "token_ids": choice.token_ids}
    if answer.shown.prompt_logprobs:
        body["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, collector.prompt_logprobs or [])
    return body


def usage_body(usage: TokenUsage) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
    if usage.timing is not None:
        body["timing"] = usage.timing.body
    return body
