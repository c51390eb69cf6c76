"""What a finished or running request looks like to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headrace.types import Logprobs, RequestTimes

__all__ = ["CompletionOutput", "Finish", "Logprob", "LogprobList", "RequestPerfMetrics", "TokenUsage", "by_token"]

Finish = Literal["stop", "length", "timeout", "cancelled"]


class Logprob(NamedTuple):
    """Log-probability of a token at a position, in nats; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None


LogprobList = list[dict[int, Logprob]] | list[float]
"""One entry a token: the chosen token first, then the likeliest; or only the chosen token's value."""


class Timing(NamedTuple):
    """Milliseconds, without gaps: from arrival to the first step, to the first token, to the last one."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float

    @property
    def header(self) -> str:
        """As `Server-Timing` has it."""
        return ", ".join(f"{name.removesuffix('_ms')};dur={value:g}" for name, value in self._asdict().items())

    @property
    def body(self) -> dict[str, Any]:
        return self._asdict()


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one user request; the prompt counts once whatever the number of choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing | None = None
    """Of the whole request, where it is known; sums have none."""
    reasoning_tokens: int = 0
    """Of the completion tokens."""

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class RequestPerfMetrics:
    """When things happened to a sequence, in seconds of `time.monotonic()`; 0.0 is never."""

    timing_metrics: RequestTimes
    cached_tokens: int


@dataclass(slots=True)
class CompletionOutput:
    """One choice. The `_diff` properties are what the last step of a stream (or the whole result) added."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    logprobs: LogprobList = field(default_factory=list[dict[int, Logprob]])
    """As many as `token_ids` when asked for, otherwise empty."""
    prompt_logprobs: list[dict[int, Logprob] | None] | list[float | None] = field(
        default_factory=list["dict[int, Logprob] | None"]
    )
    """As many as prompt tokens when asked for; the first has none. Otherwise empty."""
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it; None for an EOS token."""
    generation_logits: Any = None
    """float32 tensor [tokens, vocab] when asked for."""
    disaggregated_params: Any = None
    request_perf_metrics: RequestPerfMetrics | None = None
    text_start: int = field(default=0, repr=False)
    """Where the last step began in `text` ..."""
    token_start: int = field(default=0, repr=False)
    """... and in `token_ids`."""

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self.text_start :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self.token_start :]

    @property
    def logprobs_diff(self) -> LogprobList:
        return self.logprobs[self.token_start :]


def by_token(entries: Sequence[Logprobs | None]) -> list[dict[int, Logprob] | None]:
    """Wire entries as dicts by token id, the chosen token first."""
    return [
        None
        if entry is None
        else {token: Logprob(value, rank) for token, value, rank in zip(entry.ids, entry.values, entry.ranks)}
        for entry in entries
    ]
