"""What the cache counts, and the snapshot of it that others read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start. Blocks are summed over the layer groups."""

    lookups: int = 0
    """Admissions that asked for reuse."""
    hit_tokens: int = 0
    """Prompt tokens of those admissions that were reused."""
    miss_tokens: int = 0
    """Their other prompt tokens: the sum of the four that follow."""
    miss_tokens_no_prefix: int = 0
    miss_tokens_evicted: int = 0
    miss_tokens_granularity: int = 0
    miss_tokens_salt: int = 0
    evictions: int = 0
    """Of device blocks."""
    allocated_blocks: int = 0
    """Blocks handed out, reused ones not included."""
    reused_blocks: int = 0
    """Whole and partial ones."""
    partial_reused_blocks: int = 0
    missed_blocks: int = 0
    """Blocks that the prompts of those admissions fill, wholly or partly, and that were not reused."""
    offload_bytes: int = 0
    """Device to host."""
    onboard_bytes: int = 0
    """Host to device."""
    device_copy_bytes: int = 0
    """Within the device."""
    disk_write_bytes: int = 0
    disk_read_bytes: int = 0
    prefetched_blocks: int = 0
    """Disk to host."""
    failed_transfers: int = 0


@dataclass(slots=True)
class GroupCounters:
    """Of one layer group: totals since the start, as in `Counters`."""

    allocated_blocks: int = 0
    gen_allocated_blocks: int = 0
    """Of them those without a prompt token."""
    reused_blocks: int = 0
    partial_reused_blocks: int = 0
    missed_blocks: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Tokens found on the host, what was fetched from disk included."""
    offload_bytes: int = 0
    onboard_bytes: int = 0
    device_copy_bytes: int = 0
    prefetched_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One moment. Per group: free + cached + leased = total; the dummy block isn't counted."""

    num_total: tuple[int, ...]
    num_free: tuple[int, ...]
    num_cached: tuple[int, ...]
    """Held by nobody and reusable; evicted when blocks are wanted."""
    num_leased: tuple[int, ...]
    pinned_blocks: int
    """Device blocks that pins hold, of all groups."""
    host_total: tuple[int, ...]
    """() without a host tier."""
    host_used: tuple[int, ...]
    disk_total: tuple[int, ...]
    """() without a disk tier."""
    disk_used: tuple[int, ...]
    by_group: tuple[GroupCounters, ...]
    lookups: int
    hit_tokens: int
    miss_tokens: int
    miss_tokens_no_prefix: int
    miss_tokens_evicted: int
    miss_tokens_granularity: int
    miss_tokens_salt: int
    evictions: int
    allocated_blocks: int
    reused_blocks: int
    partial_reused_blocks: int
    missed_blocks: int
    offload_bytes: int
    onboard_bytes: int
    device_copy_bytes: int
    disk_write_bytes: int
    disk_read_bytes: int
    prefetched_blocks: int
    failed_transfers: int

    @property
    def hit_rate(self) -> float:
        """Reused share of all prompt tokens looked up; 0.0 before the first."""
        total = self.hit_tokens + self.miss_tokens
        return self.hit_tokens / total if total else 0.0
