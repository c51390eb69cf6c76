"""Counting requests: each is begun once and ended once, whoever ends it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.front.collector import Choice, Collector
from headrace.server.metrics import ABORTS, Metrics
from headrace.types import Logprobs, RequestTimes

__all__ = ["LEFT", "Meter"]

LEFT = {
    "disconnected": "the client has disconnected",
    "requested": "aborted by its request_id",
    "deadline": "the deadline of its call has passed",
}
"""Ways in which a client ends a request, in words."""

NUM_STARTS = 64
"""How many requests that began tell the pace."""
MAX_NATS = 700.0
"""Of the mean of a token; beyond it the exponential has no float."""


class Meter:
    """Observes choices. A request here is a choice: it has one end, with one reason.

    The thread that dispatches and the event loop may both want to end one; the first one counts.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._open: dict[Choice, None] = {}
        self._begun_s: deque[float] = deque(maxlen=NUM_STARTS)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def wait_of(self, num_ahead: int) -> float:
        """Seconds until so many more have begun, at the pace of late; 0.0 where there is none yet."""
        begun_s = list(self._begun_s)
        if len(begun_s) < 2:
            return 0.0
        return num_ahead * (time.monotonic() - begun_s[0]) / (len(begun_s) - 1)

    def accept(self, collectors: Iterable[Collector]) -> None:
        """Before their requests are sent."""
        for collector in collectors:
            collector.observer = self
            for choice in collector.choices:
                self._open[choice] = None
                self.metrics.counters["requests_accepted"].inc()

    def began(self, choice: Choice) -> None:
        now_s = time.monotonic()
        self._begun_s.append(now_s)
        self.metrics.histograms["time_to_first_token_seconds"].observe(now_s - choice.collector.arrival_s)

    def ended(self, choice: Choice) -> None:
        if choice.finish == "cancelled":
            self._end(choice, "error" if choice.collector.error else "abort", "other")
        else:
            assert choice.finish is not None
            self._end(choice, choice.finish, "")

    def abandon(self, collectors: Iterable[Collector], reason: str) -> None:
        """The rest of a request that was ended from outside; `reason`: of `ABORTS`, a deadline, or else a fault."""
        finish = "abort" if reason in ABORTS else "timeout" if reason == "deadline" else "error"
        for collector in collectors:
            for choice in collector.choices:
                self._end(choice, finish, reason)

    def _end(self, choice: Choice, finish: str, abort_reason: str) -> None:
        if self._open.pop(choice, self) is self:
            return
        metrics, collector = self.metrics, choice.collector
        metrics.count("requests", finish)
        if finish in ("stop", "length"):
            metrics.count("request_success", finish)
        elif finish == "abort":
            metrics.count("request_abort", abort_reason)
        counters, histograms = metrics.counters, metrics.histograms
        end_s = time.monotonic()
        if choice.index == 0:
            counters["prompt_tokens"].inc(len(collector.prompt))
            counters["prompt_cached_tokens"].inc(max(collector.cached_tokens, 0))
            histograms["prompt_cached_tokens_per_request"].observe(max(collector.cached_tokens, 0))
        counters["generation_tokens"].inc(choice.num_generated)
        histograms["e2e_request_latency_seconds"].observe(end_s - collector.arrival_s)
        self._observe_perplexity(choice)
        if choice.times is not None:
            self._observe_times(choice, choice.times)

    def _observe_perplexity(self, choice: Choice) -> None:
        """Only where a client wanted log-probabilities: nobody else's are computed."""
        histograms, prompt = self.metrics.histograms, choice.collector.prompt_logprobs
        if choice.logprobs:
            histograms["generation_perplexity"].observe(_perplexity(choice.logprobs))
        if prompt is not None and choice.index == 0 and len(prompt) > 1:
            histograms["prefill_perplexity"].observe(_perplexity(prompt[1:]))

    def _observe_times(self, choice: Choice, times: RequestTimes) -> None:
        end_s = times.last_token_s or time.monotonic()
        histograms = self.metrics.histograms
        if not times.first_scheduled_s:
            return
        histograms["request_queue_time_seconds"].observe(times.first_scheduled_s - times.arrival_s)
        histograms["request_inference_time_seconds"].observe(end_s - times.first_scheduled_s)
        if not times.first_token_s:
            return
        histograms["request_prefill_time_seconds"].observe(times.first_token_s - times.first_scheduled_s)
        decode_s = end_s - times.first_token_s
        histograms["request_decode_time_seconds"].observe(decode_s)
        if choice.num_generated > 1:
            histograms["time_per_output_token_seconds"].observe(decode_s / (choice.num_generated - 1))


def _perplexity(entries: Sequence[Logprobs | None]) -> float:
    values = [entry.values[0] for entry in entries if entry is not None]
    return math.exp(min(-sum(values) / max(len(values), 1), MAX_NATS))
