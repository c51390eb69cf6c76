"""The KV cache in the statistics of a step: totals, and what happened since the last time, by attention window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from headrace.kvcache.stats import CacheStats, GroupCounters
from headrace.seam import GroupSpec

LEVELS = ("DEVICE", "HOST", "DISK")
RECURRENT = "recurrent"
"""Key of the groups that have states instead of a window."""


class KvStats:
    """`stats` are those of all sections, which add up."""

    def __init__(self, groups: Sequence[GroupSpec], *, max_seq_len: int, tokens_per_block: int, interval: int) -> None:
        """
        Args:
            max_seq_len: the window of groups that have none.
            interval: steps between two entries by window.
        """
        self._keys = [RECURRENT if group.is_recurrent else str(group.window or max_seq_len) for group in groups]
        self._tokens_per_block = tokens_per_block
        self._interval = interval
        self._steps = 0
        self._last = [GroupCounters() for _ in groups]

    def totals(self, stats: Sequence[CacheStats]) -> dict[str, Any]:
        """`kvCacheStats`: device blocks of all groups, and counts since the start."""
        hits = sum(one.hit_tokens for one in stats)
        misses = sum(one.miss_tokens for one in stats)
        allocated = sum(one.allocated_blocks for one in stats)
        reused = sum(one.reused_blocks for one in stats)
        return {
            "maxNumBlocks": sum(sum(one.num_total) for one in stats),
            "freeNumBlocks": sum(sum(one.num_free) for one in stats),
            "usedNumBlocks": sum(sum(one.num_leased) for one in stats),
            "cachedNumBlocks": sum(sum(one.num_cached) for one in stats),
            "pinnedNumBlocks": sum(one.pinned_blocks for one in stats),
            "tokensPerBlock": self._tokens_per_block,
            "allocTotalBlocks": allocated + reused,
            "allocNewBlocks": allocated,
            "reusedBlocks": reused,
            "missedBlocks": sum(one.missed_blocks for one in stats),
            "cacheHitRate": hits / (hits + misses) if hits + misses else 0.0,
            "reusedTokens": hits,
            "missedTokens": {
                "noPrefix": sum(one.miss_tokens_no_prefix for one in stats),
                "evicted": sum(one.miss_tokens_evicted for one in stats),
                "granularity": sum(one.miss_tokens_granularity for one in stats),
                "salt": sum(one.miss_tokens_salt for one in stats),
            },
            "failedTransfers": sum(one.failed_transfers for one in stats),
        }

    def iteration(self, stats: Sequence[CacheStats]) -> dict[str, Any] | None:
        """`kvCacheIterationStats`, every `interval` steps: by window what happened since the last one. Else None."""
        self._steps += 1
        if self._steps % self._interval:
            return None
        now = [_added([one.by_group[group] for one in stats]) for group in range(len(self._keys))]
        entries: dict[str, dict[str, Any]] = {}
        for group, key in enumerate(self._keys):
            change = _added([now[group]], minus=self._last[group])
            entry = _entry(change, stats, group)
            entries[key] = _together(entries[key], entry) if key in entries else entry
        self._last = now
        return entries


def _entry(change: GroupCounters, stats: Sequence[CacheStats], group: int) -> dict[str, Any]:
    num_levels = 1 + bool(stats[0].host_total) + bool(stats[0].disk_total)
    by_level = [change.device_hit_tokens, change.host_hit_tokens, 0]  # from disk they come by way of the host
    below = [counts for one in stats for counts in ((one.host_total, one.host_used), (one.disk_total, one.disk_used))]
    return {
        "iterReusedBlocks": change.reused_blocks,
        "iterFullReusedBlocks": change.reused_blocks - change.partial_reused_blocks,
        "iterPartialReusedBlocks": change.partial_reused_blocks,
        "iterMissedBlocks": change.missed_blocks,
        "iterAllocBlocks": change.allocated_blocks,
        "iterGenAllocBlocks": change.gen_allocated_blocks,
        "iterOnboardBytes": change.onboard_bytes,
        "iterOffloadBytes": change.offload_bytes,
        "iterIntraDeviceCopyBytes": change.device_copy_bytes,
        "iterDiskPrefetchBlocks": change.prefetched_blocks,
        "iterCachedTokensByLevel": by_level[:num_levels],
        "kvCacheLevelTiers": list(LEVELS[:num_levels]),
        "primaryMaxNumBlocks": sum(one.num_total[group] for one in stats),
        "primaryUsedNumBlocks": sum(one.num_leased[group] for one in stats),
        "primaryFreeNumBlocks": sum(one.num_free[group] for one in stats),
        "secondaryMaxNumBlocks": sum(total[group] for total, _ in below if total),
        "secondaryUsedNumBlocks": sum(used[group] for _, used in below if used),
    }


def _added(counters: Sequence[GroupCounters], *, minus: GroupCounters | None = None) -> GroupCounters:
    total = GroupCounters()
    for field in fields(GroupCounters):
        value = sum(getattr(one, field.name) for one in counters)
        setattr(total, field.name, value - getattr(minus, field.name) if minus else value)
    return total


def _together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Groups of one window and different shapes. Tokens found are the same ones in both."""
    added = {key: one[key] + other[key] for key in one if isinstance(one[key], int)}
    return {**one, **added}
