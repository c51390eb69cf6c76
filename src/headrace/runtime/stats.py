"""Iteration statistics: one record a step in the keys of TensorRT-LLM's `/metrics` list."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from headrace.scheduler.scheduler import Scheduler
from headrace.seam import StepResult


class IterationStats:
    """A ring of the last records; reading drains it. Switched off it costs one comparison a step."""

    def __init__(self, *, enabled: bool, max_iterations: int = 1000, print_log: bool = False) -> None:
        self.enabled = enabled or print_log
        self._print = print_log
        self._ring: deque[dict[str, Any]] = deque(maxlen=None if max_iterations < 0 else max_iterations or 1)
        self._last_s = time.monotonic()
        self._completed = 0

    def take(self) -> list[dict[str, Any]]:
        records = list(self._ring)
        self._ring.clear()
        return records

    def record(self, scheduler: Scheduler, result: StepResult) -> None:
        if not self.enabled:
            return
        now_s = time.monotonic()
        record = build_record(scheduler, result, latency_s=now_s - self._last_s)
        self._last_s = now_s
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


def build_record(scheduler: Scheduler, result: StepResult, *, latency_s: float) -> dict[str, Any]:
    counts, settings = scheduler.counts, scheduler.settings
    caches = [section.kv.stats for section in scheduler.sections]
    lookups = sum(c.hit_tokens + c.miss_tokens for c in caches)
    rows = counts.num_context_rows + counts.num_generation_rows
    return {
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
        "kvCacheStats": {
            "maxNumBlocks": sum(c.num_total[0] for c in caches),
            "freeNumBlocks": sum(c.num_free[0] for c in caches),
            "usedNumBlocks": sum(c.num_leased[0] for c in caches),
            "cachedNumBlocks": sum(c.num_cached[0] for c in caches),
            "tokensPerBlock": settings.tokens_per_block,
            "allocTotalBlocks": sum(c.allocated_blocks + c.reused_blocks for c in caches),
            "allocNewBlocks": sum(c.allocated_blocks for c in caches),
            "reusedBlocks": sum(c.reused_blocks for c in caches),
            "missedBlocks": sum(c.missed_blocks for c in caches),
            "cacheHitRate": sum(c.hit_tokens for c in caches) / lookups if lookups else 0.0,
        },
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
        "sampleMS": result.sample_s * 1000,
    }
