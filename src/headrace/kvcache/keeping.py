"""How long each named block should stay: its priority, and when that ends."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kvcache.claim import Claim
from headrace.kvcache.news import NoNews
from headrace.kvcache.pool import BlockPool
from headrace.kvcache.radix import NONE, RadixIndex
from headrace.kvcache.retention import Expiry, priority_of
from headrace.types import DEFAULT_PRIORITY


class Keeping:
    def __init__(self, pools: Sequence[BlockPool], index: RadixIndex, news: NoNews) -> None:
        self.now_s = 0.0
        self._pools = pools
        self._index = index
        self._news = news
        self._expiry = Expiry()
        self._deadlines: dict[tuple[int, int], float] = {}
        """By (pool, block): when the priority ends; may be of an earlier life of the block."""

    def retain(self, pool: int, node: int, claim: Claim, at: int) -> None:
        """Gives the block that a node names the priority that a request wants for block `at` of its tokens."""
        size = self._index.tokens_per_block
        priority, duration_s = priority_of(
            claim.retention, prompt_len=claim.prompt_len, start=at * size, end=(at + 1) * size
        )
        deadline_s = None if duration_s is None else self.now_s + duration_s
        self._set_priority(pool, node, priority, deadline_s)

    def retain_all(self, pool: int, nodes: Sequence[int], claim: Claim, first: int) -> None:
        """`retain` of consecutive blocks, for a claim that says something about them."""
        if claim.retention is not None:
            for at, node in enumerate(nodes, first):
                if self._index.blocks[pool][node] != NONE:
                    self.retain(pool, node, claim, at)

    def inherit(self, pool: int, node: int, source: int, block: int) -> None:
        """The node's block in `pool` takes over priority and deadline of its `block` in the pool `source`."""
        pools = self._pools
        has_end = pools[source].priority[block] != DEFAULT_PRIORITY  # else it may be that of an earlier life
        deadline_s = self._deadlines.get((source, block)) if has_end else None
        self._set_priority(pool, node, pools[source].priority[block], deadline_s)

    def _set_priority(self, pool: int, node: int, priority: int, deadline_s: float | None) -> None:
        block = self._index.blocks[pool][node]
        before = self._pools[pool].priority[block]
        if before != priority:
            self._pools[pool].set_priority(block, priority)
            self._news.reprioritised(pool, node, before, priority)
        if deadline_s is None:
            self._deadlines.pop((pool, block), None)
            self._expiry.remove(pool, block)
        else:
            self._deadlines[pool, block] = deadline_s
            self._expiry.add(deadline_s, pool, block, node)

    def advance(self, now_s: float) -> None:
        """Priorities whose time is over become the default."""
        self.now_s = now_s
        for pool, block, node in self._expiry.due(now_s):
            self._deadlines.pop((pool, block), None)
            if self._pools[pool].node[block] == node:
                self._set_priority(pool, node, DEFAULT_PRIORITY, None)
