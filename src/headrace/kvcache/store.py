"""All blocks of all groups on all tiers, and their names in the index.

A pool's number is `tier * num_groups + group`, in the index as in `pools`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.kvcache.claim import Claim
from headrace.kvcache.events import EventLog, NoEvents
from headrace.kvcache.keeping import Keeping
from headrace.kvcache.news import News, NoNews
from headrace.kvcache.pool import BlockPool
from headrace.kvcache.radix import NONE, RadixIndex
from headrace.kvcache.settings import CacheSettings
from headrace.kvcache.stats import Counters, GroupCounters
from headrace.seam import GroupSpec, PoolSizes


def _ignore(pool: int, block: int) -> None:
    """Nobody keeps a list."""


class Store:
    def __init__(self, groups: tuple[GroupSpec, ...], sizes: PoolSizes, settings: CacheSettings) -> None:
        self.groups = groups
        self.settings = settings
        self.num_groups = len(groups)
        tiers = [sizes.num_blocks]
        if sizes.host_blocks:
            tiers += [sizes.host_blocks, *filter(None, (sizes.disk_blocks,))]
        self.num_tiers = len(tiers)
        self.pools = [BlockPool(max(1, count)) for tier in tiers for count in tier]
        self.index = RadixIndex(settings.tokens_per_block, num_pools=len(self.pools))
        self.counters = Counters()
        self.by_group = [GroupCounters() for _ in groups]
        self.block_bytes = tuple(group.block_bytes(settings.tokens_per_block) for group in groups)
        self.extra_leases: dict[tuple[int, int], int] = {}
        """By (pool, block): leases that no table holds."""
        self.num_pins: dict[int, int] = {}
        """By index node: pins that are neither a table's nor of a moment."""
        self.on_unname: Callable[[int, int], None] = _ignore
        """Told before a block (pool, block) loses its name, where somebody keeps a list."""
        self.events = NoEvents()
        self.news = NoNews()
        if settings.event_buffer_size and settings.reuse:
            self._listen(EventLog(
                settings.event_buffer_size, groups, index=self.index, algorithm=settings.event_hash_algo,
                max_seq_len=settings.max_seq_len,
            ))  # fmt: skip
        self.keeping = Keeping(self.pools, self.index, self.news)

    def _listen(self, events: EventLog) -> None:
        self.events = events
        self.news = News(events, self.index, self.pools, self.num_groups)
        events.created([
            [pool.num_total for pool in self.pools[group :: self.num_groups]] for group in range(self.num_groups)
        ])  # fmt: skip

    def tier(self, tier: int) -> list[BlockPool]:
        """The pools of a tier by group; [] when there is no such tier."""
        return self.pools[tier * self.num_groups : (tier + 1) * self.num_groups]

    # ---- names -------------------------------------------------------------------------------

    def block_of(self, pool: int, node: int) -> int:
        return self.index.blocks[pool][node]

    def name(self, pool: int, node: int, block: int, *, claim: Claim | None = None, at: int = 0) -> None:
        """The node names the leased block from now on."""
        self.index.set_block(pool, node, block)
        self.pools[pool].set_node(block, node)
        self.news.named(pool, (node,), claim=claim, first=at)

    def unname(self, pool: int, node: int) -> None:
        """The node becomes a hole in this pool; the block is free unless somebody holds it."""
        block = self.index.blocks[pool][node]
        self.on_unname(pool, block)
        self.news.leaving(pool, (node,))
        self.pools[pool].clear_node(block)
        self.index.clear_block(pool, node)

    def evict(self, pool: int, count: int) -> None:
        """The next `count` victims are free; of a disk pool the caller tells `on_unname`."""
        nodes = self.pools[pool].evict(count)
        self.news.leaving(pool, nodes)
        self.index.clear_blocks(pool, nodes)

    def forget(self, nodes: Sequence[int]) -> None:
        """Takes whole subtrees out of the index; `nodes` has each parent before its children."""
        for node in reversed(nodes):
            for pool, blocks in enumerate(self.index.blocks):
                if blocks[node] != NONE:
                    self.unname(pool, node)

    def hold_node(self, node: int) -> None:
        """The node stays in the index, though not its blocks."""
        self.index.pin(node)
        self.num_pins[node] = self.num_pins.get(node, 0) + 1

    def let_go(self, node: int) -> None:
        self.num_pins[node] -= 1
        if not self.num_pins[node]:
            del self.num_pins[node]
        self.index.unpin(node)

    # ---- leases ------------------------------------------------------------------------------

    def lease(self, pool: int, block: int) -> None:
        self.pools[pool].lease(block)
        self.note_lease(pool, block)

    def note_lease(self, pool: int, block: int) -> None:
        """The caller's lease on the block, which it has, is no table's."""
        self.extra_leases[pool, block] = self.extra_leases.get((pool, block), 0) + 1

    def unlease(self, pool: int, block: int) -> None:
        """Gives a lease of `lease` or `note_lease` back."""
        count = self.extra_leases.get((pool, block), 0)
        assert count > 0, f"block {block} of pool {pool} has no extra lease"
        if count > 1:
            self.extra_leases[pool, block] = count - 1
        else:
            del self.extra_leases[pool, block]
        self.pools[pool].unlease(block)
