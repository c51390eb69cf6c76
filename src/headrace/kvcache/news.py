"""From names given and taken to events: a node's block is stored, moves between tiers, is removed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.kvcache.claim import Claim
from headrace.kvcache.events import EventLog
from headrace.kvcache.pool import BlockPool
from headrace.kvcache.radix import NONE, RadixIndex
from headrace.types import MediaSpan


class NoNews:
    """Nobody wants to know."""

    def named(self, pool: int, nodes: Sequence[int], *, claim: Claim | None = None, first: int = 0) -> None: ...

    def leaving(self, pool: int, nodes: Sequence[int]) -> None: ...

    def reprioritised(self, pool: int, node: int, before: int, after: int) -> None: ...


class News(NoNews):
    """Tells `events`. The level of a block is the nearest tier that has it."""

    def __init__(self, events: EventLog, index: RadixIndex, pools: Sequence[BlockPool], num_groups: int) -> None:
        self._events = events
        self._index = index
        self._pools = pools
        self._num_groups = num_groups
        self._level: dict[tuple[int, int], int] = {}
        """By (group, node), as last told."""

    def named(self, pool: int, nodes: Sequence[int], *, claim: Claim | None = None, first: int = 0) -> None:
        """After names were given. `claim` with a node's first name; `first`: the first node's place in the path."""
        group = pool % self._num_groups
        for at, node in enumerate(nodes, first):
            level = self._nearest(group, node)
            before = self._level.get((group, node))
            if before is None:
                assert claim is not None, "a block is moved that was never stored"
                self._store(group, node, level, claim, at)
            elif level != before:
                self._events.updated(group, node, level=(before, level))
            self._level[group, node] = level

    def leaving(self, pool: int, nodes: Sequence[int]) -> None:
        """Before names are taken."""
        group = pool % self._num_groups
        for node in nodes:
            level = self._nearest(group, node, without=pool)
            before = self._level[group, node]
            if level == NONE:
                del self._level[group, node]
                self._events.removed(group, node)
            elif level != before:
                self._level[group, node] = level
                self._events.updated(group, node, level=(before, level))

    def reprioritised(self, pool: int, node: int, before: int, after: int) -> None:
        if before != after:
            self._events.updated(pool % self._num_groups, node, priority=(before, after))

    def _nearest(self, group: int, node: int, without: int = NONE) -> int:
        for level, pool in enumerate(range(group, len(self._pools), self._num_groups)):
            if pool != without and self._index.blocks[pool][node] != NONE:
                return level
        return NONE

    def _store(self, group: int, node: int, level: int, claim: Claim, at: int) -> None:
        index = self._index
        pool = level * self._num_groups + group
        priority = self._pools[pool].priority[index.blocks[pool][node]]
        start = at * index.tokens_per_block
        end = start + index.tokens_per_block
        media = [
            MediaSpan(max(span.start, start) - start, span.length, span.digest)
            for span in claim.media
            if span.start < end and span.start + span.length > start
        ]
        tokens = index.tokens_of(node)
        self._events.stored(group, node, index.parent[node], tokens, level, priority, claim.space, media)
