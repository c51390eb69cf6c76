"""What running owners may still take at worst, and what is left for others.

In a group without a window an owner's blocks only grow, so blocks that it shares need not be counted for it. In a
window group an owner gives blocks back to take others: one that somebody else holds as well gives nothing back. There
every owner counts whole, and leases beyond the first of a block count as taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.kvcache.reuse import most_at_once
from headrace.kvcache.store import Store
from headrace.kvcache.table import Table


class Promises:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._size = store.settings.tokens_per_block
        self.attention = [group for group, spec in enumerate(store.groups) if not spec.is_recurrent]
        self.promised = [0] * store.num_groups
        """By group: blocks that owners are entitled to and don't hold."""
        self.set_aside = 0
        """Blocks of each group that the caller has promised besides (beams)."""
        in_flight = store.settings.max_tokens_in_flight
        self._bounds = [most_at_once(spec, in_flight, self._size) for spec in store.groups]
        self._has_window = [spec.window is not None for spec in store.groups]

    def most(self, group: int, num_tokens: int, *, slides: bool = True) -> int:
        """Blocks of a group that a sequence of up to `num_tokens` tokens holds at a time, at worst."""
        whole, bound = -(-num_tokens // self._size), self._bounds[group]
        return bound if slides and bound < whole else whole

    def spare(self, group: int) -> int:
        """Device blocks that may be taken without breaking a promise."""
        pool = self._store.pools[group]
        count = len(pool.free) + pool.num_cached - self.promised[group] - self.set_aside
        return count - pool.num_shared if self._has_window[group] else count

    def entitle(self, table: Table, num_tokens: int) -> None:
        """The owner may take blocks for as many tokens; it is counted what it doesn't hold of them."""
        for group in self.attention:
            part = table.parts[group]
            part.num_entitled = max(self.most(group, num_tokens), part.num_held)
            self.promised[group] += part.num_entitled - part.num_held

    def hold(self, table: Table, group: int, count: int) -> None:
        """The owner has `count` blocks more, or fewer."""
        part = table.parts[group]
        part.num_held += count
        if part.num_entitled:
            self.promised[group] -= count
            beyond = part.num_held - part.num_entitled
            if beyond > 0 and table.grows:
                part.num_entitled += beyond
                self.promised[group] += beyond

    def unpromised(self) -> int:
        """Device blocks of every attention group that are nobody's."""
        pools, promised = self._store.pools, self.promised
        return min(
            [len(pools[group].free) + pools[group].num_cached - promised[group] for group in self.attention],
            default=sys.maxsize,
        )

    def room(self, table: Table) -> int:
        """Device blocks of every attention group that an owner may take now: its own, and what is nobody's."""
        fewest, pools = sys.maxsize, self._store.pools
        for group in self.attention:
            pool, part = pools[group], table.parts[group]
            due = part.num_entitled - part.num_held
            room = len(pool.free) + pool.num_cached - self.promised[group] + (due if due > 0 else 0)
            if room < fewest:
                fewest = room
        return fewest

    def end(self, table: Table) -> None:
        for group, part in enumerate(table.parts):
            if part.num_entitled:
                self.promised[group] -= part.num_entitled - part.num_held

    def max_tokens(self, pinned: Sequence[int], *, width: int = 1) -> int:
        """Tokens that a sequence may have, `width` of which (beams) are there and nobody else.

        Beams share nothing at worst, need a block for the copy at a fork, and keep what is out of the window.
        """
        fewest = sys.maxsize
        for group in self.attention:
            usable = self._store.pools[group].num_total - pinned[group]
            if width > 1:
                usable = usable // width - 1
            elif usable >= self._bounds[group]:
                continue
            fewest = min(fewest, max(usable, 0) * self._size)
        return fewest
