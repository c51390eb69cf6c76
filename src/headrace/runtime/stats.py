"""Iteration statistics: one record a step in the keys of TensorRT-LLM's `/metrics` list."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from headrace.runtime.kv_stats import KvStats
from headrace.runtime.totals import StepTotals
from headrace.scheduler.scheduler import Scheduler
from headrace.seam import StepResult


class IterationStats:
    """A ring of the last records; reading drains it. Switched off, only the totals are kept."""

    def __init__(self, kv: KvStats, *, enabled: bool, max_iterations: int = 1000, print_log: bool = False) -> None:
        self.totals = StepTotals()
        self._kv = kv
        self.enabled = enabled or print_log
        self._print = print_log
        self._ring: deque[dict[str, Any]] = deque(maxlen=None if max_iterations < 0 else max_iterations or 1)
        self._last_s = time.monotonic()
        self._completed = 0
        self._result = StepResult(0, ())

    def take(self) -> list[dict[str, Any]]:
        records = list(self._ring)
        self._ring.clear()
        return records

    def current(self, scheduler: Scheduler) -> dict[str, Any]:
        """The state now, in the keys of a record; what happened in a step is the last one's."""
        return build_record(scheduler, self._result, self._kv, latency_s=self.totals.last_s, in_steps=False)

    def record(self, scheduler: Scheduler, result: StepResult) -> None:
        now_s = time.monotonic()
        latency_s, self._last_s = now_s - self._last_s, now_s
        self.totals.record(scheduler.counts, result, latency_s=latency_s)
        if scheduler.counts.num_admitted:
            self.totals.record_reuse(section.kv.counters for section in scheduler.sections)
        self._result = result
        if not self.enabled:
            return
        record = build_record(scheduler, result, self._kv, latency_s=latency_s)
        self._completed += scheduler.counts.num_ended
        self._ring.append(record)
        if self._print:
            flight = record["inflightBatchingStats"]
            print(
                f"iter {result.step}: {record['iterLatencyMS']:.2f} ms, "
                f"{flight['numContextRequests']} context + {flight['numGenRequests']} generation, "
                f"{flight['numCtxTokens']} context tokens, {record['numQueuedRequests']} queued",
                flush=True,
            )


def take_kv_events(scheduler: Scheduler) -> list[dict[str, Any]]:
    """The cache events of all sections; where there are several, each event says whose it is."""
    if len(scheduler.sections) == 1:
        return scheduler.sections[0].kv.take_events()
    return [
        {**event, "attention_dp_rank": rank}
        for rank, section in enumerate(scheduler.sections)
        for event in section.kv.take_events()
    ]


def build_record(
    scheduler: Scheduler, result: StepResult, kv: KvStats, *, latency_s: float, in_steps: bool = True
) -> dict[str, Any]:
    """`in_steps`: it is one of the series, so what changed since the last one is told too."""
    counts, settings = scheduler.counts, scheduler.settings
    caches = [section.kv.stats for section in scheduler.sections]
    rows = counts.num_context_rows + counts.num_generation_rows
    record: dict[str, Any] = {
        "timestamp": time.time(),
        "iter": result.step,
        "iterLatencyMS": latency_s * 1000,
        "newActiveRequestsQueueLatencyMS": counts.queue_latency_s * 1000,
        "numNewActiveRequests": counts.num_admitted,
        "numActiveRequests": scheduler.num_active,
        "numQueuedRequests": len(scheduler.queue),
        "numCompletedRequests": counts.num_ended,
        "maxNumActiveRequests": settings.max_batch_size,
        "maxBatchSizeStatic": settings.max_batch_size,
        "maxBatchSizeRuntime": settings.max_batch_size,
        "maxNumTokensStatic": settings.max_num_tokens,
        "maxNumTokensRuntime": settings.max_num_tokens,
        "kvCacheStats": kv.totals(caches),
        "inflightBatchingStats": {
            "numScheduledRequests": rows,
            "numContextRequests": counts.num_context_rows,
            "numGenRequests": counts.num_generation_rows,
            "numPausedRequests": counts.num_preempted,
            "numCtxTokens": counts.num_context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": counts.num_generated / rows if rows else 0.0,
        },
        "forwardMS": result.forward_s * 1000,
        "deviceIdleMS": result.idle_s * 1000,
    }
    by_window = kv.iteration(caches) if in_steps else None
    if by_window is not None:
        record["kvCacheIterationStats"] = by_window
    return record
