"""What the scheduler is told once, after `settle`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    max_batch_size: int
    """Active requests (beams count each) in one section."""
    max_num_tokens: int
    """Tokens computed in one step of one section."""
    max_seq_len: int
    num_slots: int
    tokens_per_block: int
    depth: int = 1
    """Plans in flight while the next one is made: 0, 1, or the number of pipeline stages."""
    chained: bool = True
    """A slot may have rows in several plans in flight (false between pipeline stages)."""
    draft_len: int = 0
    """Drafts a generation row verifies; 0 without speculation."""
    capacity_policy: str = "GUARANTEED_NO_EVICT"
    chunking_policy: str = "FIRST_COME_FIRST_SERVED"
    chunked_prefill: bool = True
    queue_by_priority: bool = False
    prefix_aware: bool = True
    reuse: bool = True
    batch_wait_timeout_s: float = 0.0
    batch_wait_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    max_step_s: float = 0.0
    """About as long as a step may take for its prompts (`pace.py`); 0 bounds it by tokens alone."""
    max_skips: int = 32
    """Later requests admitted past a waiting one before nobody may pass it any more."""
