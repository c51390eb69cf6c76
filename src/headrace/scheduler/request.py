"""A request inside the runtime: waiting, active with a slot, finished."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.claim import Claim
from headrace.types import FinishReason, Logprobs, Request, RequestTimes

HOLD_KINDS = ("grammar", "adapter", "encoder", "transfer")
"""What a request can wait for before it may be admitted."""


@dataclass(slots=True)
class Waiting:
    """A request without a slot: new, held, or preempted (then `tokens` has what it generated)."""

    request: Request
    tokens: list[int]
    order: int
    """Arrival number; a preempted request keeps its own and so goes to the front."""
    claim: Claim
    holds: dict[str, float] = field(default_factory=dict[str, float])
    """What it waits for -> deadline (monotonic seconds); empty when it may be admitted."""
    skipped: int = 0
    """Steps in which later requests were admitted past it."""
    times: RequestTimes = field(default_factory=RequestTimes)
    cached_tokens: int = -1
    prompt_logprobs_done: bool = False
    is_preempted: bool = False
    is_fetched: bool = False
    """Its blocks on disk have been asked for, and there was room: once is enough."""

    def hold(self, kind: str, deadline_s: float) -> None:
        assert kind in HOLD_KINDS, kind
        self.holds[kind] = deadline_s

    @property
    def deadline_s(self) -> float:
        timeout = self.request.timeout_s
        return float("inf") if timeout is None else self.request.arrival_s + timeout


@dataclass(slots=True, eq=False)
class Active:
    """A request that owns a slot. What changes every step lives in the slot table, not here."""

    request: Request
    tokens: list[int]
    """Prompt and committed output."""
    claim: Claim
    num_known: int
    """Tokens at admission; what is beyond them was sampled since."""
    slot: int
    order: int
    planned: int
    """Known tokens whose computation is planned or done; the prompt is through at len(tokens)."""
    times: RequestTimes
    cached_tokens: int
    limit: int
    """Prompt and output together end at this length."""
    finish: FinishReason | None = None
    preempting: bool = False
    """Leaves its slot for the queue once its rows in flight are committed."""
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    """Collected chunk by chunk; the first position has none."""
    prompt_logprobs_done: bool = False
    hidden: NDArray[np.float32] | None = None
    """Sum over the chunks so far, of a request with `pooling`."""

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the cache, when nothing is in flight."""
        return len(self.tokens) - 1 if len(self.tokens) > self.num_known else self.planned

    @property
    def min_len(self) -> int:
        """No stop id ends the sequence while it isn't longer."""
        return len(self.request.prompt) + self.request.min_tokens

    @property
    def draining(self) -> bool:
        return self.finish is not None or self.preempting

    @property
    def context_left(self) -> int:
        return len(self.tokens) - self.planned


def stamp(times: RequestTimes, *, first_scheduled_s: float = 0.0, first_token_s: float = 0.0) -> RequestTimes:
    """The same times with the first scheduling or first token filled in, if they were not."""
    return RequestTimes(
        arrival_s=times.arrival_s,
        first_scheduled_s=times.first_scheduled_s or first_scheduled_s,
        first_token_s=times.first_token_s or first_token_s,
        last_token_s=first_token_s or times.last_token_s,
    )


def closed(times: RequestTimes, now_s: float) -> RequestTimes:
    """The times of a request that ends now."""
    return RequestTimes(times.arrival_s, times.first_scheduled_s, times.first_token_s, now_s)
