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
    """Their other prompt tokens."""
    evictions: int = 0
    allocated_blocks: int = 0
    """Blocks handed out, reused ones not included."""
    reused_blocks: int = 0
    missed_blocks: int = 0
    """Blocks that the prompts of those admissions fill, wholly or partly, and that were not reused."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One moment. Per group: free + cached + leased = total; the dummy block isn't counted."""

    num_total: tuple[int, ...]
    num_free: tuple[int, ...]
    num_cached: tuple[int, ...]
    """Held by nobody and reusable; evicted when blocks are wanted."""
    num_leased: tuple[int, ...]
    lookups: int
    hit_tokens: int
    miss_tokens: int
    evictions: int
    allocated_blocks: int
    reused_blocks: int
    missed_blocks: int

    @property
    def hit_rate(self) -> float:
        """Reused share of all prompt tokens looked up; 0.0 before the first."""
        total = self.hit_tokens + self.miss_tokens
        return self.hit_tokens / total if total else 0.0
