"""Capacity policies: who may have blocks, and who gives them back when there are none.

Names and meaning: TensorRT-LLM's `capacity_scheduler_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.kvcache.manager import KvCache
from headrace.scheduler.request import Active, Waiting


class CapacityPolicy(Protocol):
    may_preempt: bool

    def may_open_batch(self, num_active: int) -> bool:
        """Whether new requests may join at all, given the active ones before this step's admissions."""
        ...

    def can_admit(self, kv: KvCache, waiting: Waiting, *, limit: int, width: int, reuse: bool) -> bool:
        """Whether the blocks are there, besides what active requests were promised."""
        ...


def blocks_of_further_beams(kv: KvCache, *, limit: int, width: int) -> int:
    """What beams need at worst beyond the first one's `limit` tokens: each its own, and each a copy at a fork."""
    return kv.blocks_needed(limit) * (width - 1) + width if width > 1 else 0


class GuaranteedNoEvict:
    """Admit only what can run to its end: worst-case blocks are promised at admission."""

    may_preempt = False

    def may_open_batch(self, num_active: int) -> bool:
        return True

    def can_admit(self, kv: KvCache, waiting: Waiting, *, limit: int, width: int, reuse: bool) -> bool:
        return kv.can_admit(
            waiting.tokens,
            claim=waiting.claim,
            num_tokens=limit,
            headroom=blocks_of_further_beams(kv, limit=limit, width=width),
            reuse=reuse,
            slides=width == 1,
        )


class MaxUtilization:
    """Admit what fits now; when blocks run out, the request admitted last goes back to the queue."""

    may_preempt = True

    def may_open_batch(self, num_active: int) -> bool:
        return True

    def can_admit(self, kv: KvCache, waiting: Waiting, *, limit: int, width: int, reuse: bool) -> bool:
        if width > 1:  # beams fork mid-way and cannot be preempted: they need their worst case
            return GuaranteedNoEvict().can_admit(kv, waiting, limit=limit, width=width, reuse=reuse)
        num_tokens = min(len(waiting.tokens) + 1, limit)
        return kv.can_admit(waiting.tokens, claim=waiting.claim, num_tokens=num_tokens, reuse=reuse)


class StaticBatch(GuaranteedNoEvict):
    """A batch runs until its last request ends; nobody joins it on the way."""

    def may_open_batch(self, num_active: int) -> bool:
        return num_active == 0


POLICIES: dict[str, type[CapacityPolicy]] = {
    "GUARANTEED_NO_EVICT": GuaranteedNoEvict,
    "MAX_UTILIZATION": MaxUtilization,
    "STATIC_BATCH": StaticBatch,
}


def pick_victim(actives: Sequence[Active]) -> Active | None:
    """Who is preempted: the request that arrived last, so that the oldest always makes progress.

    The oldest active request is never a victim; with one request left there is none.
    """
    candidates = [active for active in actives if not active.draining and active.request.beam is None]
    if len(candidates) < 2:
        return None
    return max(candidates, key=lambda active: active.order)
