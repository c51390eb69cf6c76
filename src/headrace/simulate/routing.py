"""Which instance a request goes to. The names are those of TensorRT-LLM's disaggregated server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.types import Request

KV_LOAD_WEIGHT = 0.25
"""`kv_cache_aware`: a share of the prompt that is cached counts as much as this times the load of one more batch."""


class Target(Protocol):
    """What a router sees of an instance."""

    def match(self, request: Request) -> int: ...


class Loads:
    """Requests and tokens of each instance that were sent to it and have not ended."""

    def __init__(self, count: int) -> None:
        self.requests = [0] * count
        self.tokens = [0] * count
        self._turn = 0

    def begin(self, at: int, request: Request) -> None:
        self.requests[at] += 1
        self.tokens[at] += len(request.prompt) + request.max_tokens

    def end(self, at: int, request: Request) -> None:
        self.requests[at] -= 1
        self.tokens[at] -= len(request.prompt) + request.max_tokens

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn - 1


Router = Callable[[Request, Sequence[Target], Loads], int]


def round_robin(request: Request, targets: Sequence[Target], loads: Loads) -> int:
    return loads.next_turn() % len(targets)


def load_balancing(request: Request, targets: Sequence[Target], loads: Loads) -> int:
    """The instance with the fewest tokens, asked and to come, of requests that have not ended."""
    return loads.tokens.index(min(loads.tokens))


def kv_cache_aware(request: Request, targets: Sequence[Target], loads: Loads) -> int:
    """The most of the prompt in the cache, less a penalty for more requests than the others have."""
    most = max(max(loads.requests), 1)

    def score(at: int) -> float:
        cached = targets[at].match(request) / len(request.prompt)
        return cached - KV_LOAD_WEIGHT * loads.requests[at] / most

    least = min(loads.requests)
    return max(range(len(targets)), key=lambda at: (score(at), loads.requests[at] == least, -at))


ROUTERS: dict[str, Router] = {
    "round_robin": round_robin,
    "load_balancing": load_balancing,
    "kv_cache_aware": kv_cache_aware,
}
