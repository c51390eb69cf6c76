"""What one HTTP request is answered with: the facts that all its pieces share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headrace.front.collector import Choice, Collector
from headrace.front.outputs import TokenUsage
from headrace.text.tokenizer import Tokenizer

__all__ = ["Answer", "Route", "finish_name", "usage_body"]


@dataclass(kw_only=True)
class Answer:
    """Of one HTTP request; choice `index` of prompt `p` is number `p * n + index` of the response."""

    kind: Literal["chat", "completion", "pin"]
    model: str
    n: int
    tokenizer: Tokenizer | None
    """None only where nothing needs a token's name."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens are shown at each position; None shows no log-probabilities."""
    prompt_logprobs: bool = False
    echo: Sequence[str] | None = None
    """The prompts' texts, to be put before each choice's."""
    stream_interval: int = 1
    failure_status: int = 500
    """Of a request that the runtime could not finish."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.id = self.id or f"{prefix}-{uuid.uuid4().hex}"

    def total_usage(self, collectors: Sequence[Collector]) -> TokenUsage:
        total = TokenUsage(0, 0, 0)
        for collector in collectors:
            total = total + collector.usage()
        return total


class Route(Protocol):
    """How one of the APIs writes an answer; `prompt` is the number of the prompt that a choice belongs to."""

    def response(self, collectors: Sequence[Collector]) -> bytes:
        """The whole body, of finished requests."""
        ...

    def opening(self, choice: Choice, prompt: int) -> bytes:
        """What a stream says before a choice's first piece."""
        ...

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int) -> bytes:
        """What a choice got since then; empty when there is nothing to show."""
        ...

    def end(self, choice: Choice, prompt: int) -> bytes:
        """A choice's last piece, with its finish reason."""
        ...

    def usage(self, usage: TokenUsage) -> bytes:
        """The piece with the usage, after all choices."""
        ...


def finish_name(choice: Choice) -> str:
    assert choice.finish is not None
    return choice.finish


def usage_body(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
