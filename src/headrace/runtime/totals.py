"""What a runtime has done since its start, for metrics: a few additions a step, and a snapshot when somebody asks."""

from __future__ import annotations

import math
import os
import resource
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace import wire
from headrace.kvcache.stats import CacheStats, Counters
from headrace.scheduler.queue import WaitingQueue
from headrace.scheduler.scheduler import Scheduler, StepCounts
from headrace.seam import StepResult
from headrace.wire import Sample

PREFILL_BOUNDS = [float(64 << n) for n in range(10)]  # to 32,768 tokens
COMPILE_BOUNDS = [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]


@dataclass(slots=True)
class Tally:
    """A histogram in the making."""

    bounds: list[float]
    counts: list[int] = field(default_factory=list[int])
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def named(self, name: str) -> wire.Distribution:
        return wire.Distribution(name, self.bounds, self.counts, self.total)


@dataclass(slots=True)
class StepTotals:
    """Written by the loop's thread only."""

    steps: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    admitted: int = 0
    preempted: int = 0
    ended: int = 0
    compute_s: float = 0.0
    eager: int = 0
    last: StepCounts = field(default_factory=StepCounts)
    """Of the latest step."""
    last_s: float = 0.0
    """How long it took."""
    reuse_rate: float = 0.0
    """Of the blocks that the latest admitted prompts fill, those that were there."""
    known: tuple[int, int] = (0, 0)
    """Blocks reused and missed up to there."""
    prefill_tokens: Tally = field(default_factory=lambda: Tally(PREFILL_BOUNDS))
    """Prompt tokens of the steps that had any."""
    grammar_s: Tally = field(default_factory=lambda: Tally(COMPILE_BOUNDS))

    def record(self, counts: StepCounts, result: StepResult, *, latency_s: float) -> None:
        """`latency_s` is since the step before; an engine that measures its own time has no rest in it."""
        self.steps += 1
        self.context_tokens += counts.num_context_tokens
        self.generated_tokens += counts.num_generated
        self.admitted += counts.num_admitted
        self.preempted += counts.num_preempted
        self.ended += counts.num_ended
        self.last = counts
        self.eager = result.num_eager
        self.last_s = result.forward_s or latency_s
        self.compute_s += self.last_s
        if counts.num_context_tokens:
            self.prefill_tokens.add(counts.num_context_tokens)
        for outcome in result.finished_commands.values():
            if "compile_s" in outcome:
                self.grammar_s.add(outcome["compile_s"])

    def record_reuse(self, caches: Iterable[Counters]) -> None:
        """After a step that has admitted requests."""
        reused, missed = 0, 0
        for counters in caches:
            reused += counters.reused_blocks
            missed += counters.missed_blocks
        found, wanted = reused - self.known[0], reused + missed - sum(self.known)
        if wanted:
            self.reuse_rate = found / wanted
        self.known = reused, missed

    def snapshot(self, scheduler: Scheduler) -> wire.Metrics:
        caches = [section.kv.stats for section in scheduler.sections]
        return wire.Metrics(
            [
                *self._gauges(scheduler),
                *_kv_gauges(caches, scheduler.settings.tokens_per_block),
                Sample("kv_cache_iter_reuse_rate", self.reuse_rate),
            ],
            [*self._counters(), *_kv_counters(caches)],
            [self.prefill_tokens.named("prefill_batch_tokens"), self.grammar_s.named("grammar_compile_seconds")],
        )

    def _gauges(self, scheduler: Scheduler) -> list[Sample]:
        settings, last = scheduler.settings, self.last
        rows = last.num_context_rows + last.num_generation_rows
        # What the last step had says nothing about an engine that rests.
        busy = 1.0 if scheduler.num_active else 0.0
        return [
            Sample("num_requests_running", scheduler.num_active),
            Sample("num_requests_waiting", len(scheduler.queue)),
            *_queue_gauges(scheduler.queue),
            Sample("max_num_active_requests", settings.max_batch_size),
            Sample("num_context_requests", busy * last.num_context_rows),
            Sample("num_generation_requests", busy * last.num_generation_rows),
            Sample("num_paused_requests", busy * last.num_preempted),
            Sample("num_scheduled_requests", busy * rows),
            Sample("scheduled_batch_size", busy * rows),
            Sample("total_context_tokens", busy * last.num_context_tokens),
            Sample("avg_decoded_tokens_per_iter", busy * last.num_generated / rows if rows else 0.0),
            Sample("prefill_batch_occupancy", busy * last.num_context_tokens / settings.max_num_tokens),
            Sample("iteration_latency_seconds", self.last_s),
            Sample("max_batch_size_static", settings.max_batch_size),
            Sample("max_batch_size_runtime", settings.max_batch_size),
            Sample("max_num_tokens_runtime", settings.max_num_tokens),
            Sample("cpu_memory_usage_bytes", _resident_bytes()),
        ]

    def _counters(self) -> list[Sample]:
        return [
            Sample("steps", self.steps),
            Sample("step_seconds", self.compute_s),
            Sample("step_tokens", self.context_tokens, {"kind": "context"}),
            Sample("step_tokens", self.generated_tokens, {"kind": "generation"}),
            Sample("eager_fallbacks", self.eager),
            Sample("num_requests_completed", self.ended),
            Sample("num_requests_admitted", self.admitted),
            Sample("num_requests_preempted", self.preempted),
        ]


def _queue_gauges(queue: WaitingQueue) -> list[Sample]:
    """A pass over the queue, for each scrape."""
    num_tokens, oldest_s = 0, math.inf
    for waiting in queue:
        num_tokens += len(waiting.request.prompt)
        oldest_s = min(oldest_s, waiting.request.arrival_s)
    age_s = max(time.monotonic() - oldest_s, 0.0)
    return [
        Sample("num_tokens_waiting", num_tokens),
        Sample("queue_oldest_seconds", age_s if math.isfinite(oldest_s) else 0.0),
    ]


def _kv_gauges(caches: Sequence[CacheStats], tokens_per_block: int) -> list[Sample]:
    total = sum(sum(one.num_total) for one in caches)
    leased = sum(sum(one.num_leased) for one in caches)
    host_total = sum(sum(one.host_total) for one in caches)
    host_used = sum(sum(one.host_used) for one in caches)
    hits = sum(one.hit_tokens for one in caches)
    looked_up = hits + sum(one.miss_tokens for one in caches)
    return [
        Sample("kv_cache_hit_rate", hits / looked_up if looked_up else 0.0),
        Sample("kv_cache_utilization", leased / total if total else 0.0),
        Sample("kv_cache_host_utilization", host_used / host_total if host_total else 0.0),
        Sample("kv_cache_max_blocks", total),
        Sample("kv_cache_used_blocks", leased),
        Sample("kv_cache_cached_blocks", sum(sum(one.num_cached) for one in caches)),
        Sample("kv_cache_free_blocks", sum(sum(one.num_free) for one in caches)),
        Sample("kv_cache_pinned_blocks", sum(one.pinned_blocks for one in caches)),
        Sample("kv_cache_tokens_per_block", tokens_per_block),
    ]


def _kv_counters(caches: Sequence[CacheStats]) -> list[Sample]:
    groups = [group for one in caches for group in one.by_group]
    # The groups of a model find the same tokens: the first of each cache counts.
    firsts = [one.by_group[0] for one in caches if one.by_group]
    partial = sum(one.partial_reused_blocks for one in caches)
    reused = sum(one.reused_blocks for one in caches)
    missed = sum(one.missed_blocks for one in caches)
    onboard = sum(one.onboard_bytes for one in caches)
    offload = sum(one.offload_bytes for one in caches)
    return [
        Sample("kv_cache_reused_blocks", reused),
        Sample("kv_cache_missed_blocks", missed),
        Sample("kv_cache_iter_reused_blocks", reused),
        Sample("kv_cache_iter_full_reused_blocks", reused - partial),
        Sample("kv_cache_iter_partial_reused_blocks", partial),
        Sample("kv_cache_iter_missed_blocks", missed),
        Sample("kv_cache_gen_alloc_blocks", sum(group.gen_allocated_blocks for group in groups)),
        Sample("kv_cache_onboard_bytes", onboard),
        Sample("kv_cache_offload_bytes", offload),
        Sample("kv_cache_intra_device_copy_bytes", sum(one.device_copy_bytes for one in caches)),
        Sample("kv_cache_disk_prefetch_blocks", sum(one.prefetched_blocks for one in caches)),
        Sample("kv_cache_disk_write_bytes", sum(one.disk_write_bytes for one in caches)),
        Sample("kv_cache_disk_read_bytes", sum(one.disk_read_bytes for one in caches)),
        Sample("kv_cache_evicted_blocks", sum(one.evictions for one in caches)),
        Sample("kv_cache_failed_transfers", sum(one.failed_transfers for one in caches)),
        Sample("prompt_cache_hit_tokens", sum(group.device_hit_tokens for group in firsts), _tier(0, "device")),
        Sample("prompt_cache_hit_tokens", sum(group.host_hit_tokens for group in firsts), _tier(1, "host")),
    ]


def _tier(level: int, tier: str) -> dict[str, str]:
    return {"cache_level": str(level), "cache_tier": tier}


def _resident_bytes() -> int:
    """Of this process; the peak where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
