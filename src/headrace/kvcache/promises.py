"""What running owners may still take at worst, and what is left for others.

In a group without a window an owner's blocks only grow, so blocks that it shares need not be counted for it. In a
window group an owner gives blocks back to take others: one that somebody else holds as well gives nothing back. There
every owner counts whole, and leases beyond the first of a block count as taken. Each is promised what it holds at
rest; what tokens in flight take besides is kept back once, for all of them: a step's tokens are shared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.kvcache.reuse import blocks_in_flight, most_at_rest
from headrace.kvcache.store import Store
from headrace.kvcache.table import Table


class Promises:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._size = store.settings.tokens_per_block
        self.attention = [group for group, spec in enumerate(store.groups) if not spec.is_recurrent]
        self.promised = [0] * store.num_groups
        """By group: blocks that owners are entitled to and don't hold."""
        self.beyond = [0] * store.num_groups
        """By group: `Part.num_beyond` of all owners."""
        self.taken = [0] * store.num_groups
        """By group: blocks that owners hold beyond what they are entitled to."""
        self.set_aside = 0
        """Blocks of each group that the caller has promised besides (beams)."""
        in_flight = store.settings.max_tokens_in_flight
        self.in_flight = blocks_in_flight(in_flight, self._size)
        """Blocks of each window group that owners never hold more of beyond what they are entitled to."""
        self._rest = [most_at_rest(spec, self._size) if in_flight else sys.maxsize for spec in store.groups]
        self._has_window = [spec.window is not None for spec in store.groups]

    def most(self, group: int, num_tokens: int, *, slides: bool = True) -> int:
        """Blocks of a group that a sequence of up to `num_tokens` tokens is promised for itself."""
        whole, rest = -(-num_tokens // self._size), self._rest[group]
        return rest if slides and rest < whole else whole

    def alone(self, group: int, num_tokens: int) -> int:
        """Blocks of a group that such a sequence needs when it is the only one."""
        return min(-(-num_tokens // self._size), self._rest[group] + self.in_flight)

    def spare(self, group: int) -> int:
        """Device blocks that may be taken without breaking a promise."""
        pool = self._store.pools[group]
        count = len(pool.free) + pool.num_cached - self.promised[group] - self.set_aside
        return count - pool.num_shared - self._kept_back(group) if self._has_window[group] else count

    def more_kept_back(self, group: int, beyond: int) -> int:
        """Blocks that can't be spared any more once an owner may take so many beyond what it is promised."""
        return self._kept_back(group, beyond) - self._kept_back(group) if beyond else 0

    def _kept_back(self, group: int, more: int = 0) -> int:
        """Blocks that tokens in flight may take yet, beyond what their owners are promised."""
        return max(min(self.in_flight, self.beyond[group] + more) - self.taken[group], 0)

    def entitle(self, table: Table, num_tokens: int) -> None:
        """The owner may take blocks for as many tokens; it is counted what it doesn't hold of them."""
        whole = -(-num_tokens // self._size)
        for group in self.attention:
            part = table.parts[group]
            part.num_entitled = max(self.most(group, num_tokens), part.num_held)
            part.num_beyond = max(whole - part.num_entitled, 0)
            self.promised[group] += part.num_entitled - part.num_held
            self.beyond[group] += part.num_beyond

    def hold(self, table: Table, group: int, count: int) -> None:
        """The owner has `count` blocks more, or fewer."""
        part = table.parts[group]
        due = part.num_entitled - part.num_held
        part.num_held += count
        if part.num_entitled:
            left = due - count
            if left < 0 and table.grows:
                more = min(-left, max(self._rest[group] - part.num_entitled, 0))
                part.num_entitled += more
                left += more
            if due >= 0 and left >= 0:
                self.promised[group] += left - due
            else:
                self.promised[group] += max(left, 0) - max(due, 0)
                self.taken[group] += max(-left, 0) - max(-due, 0)

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
                due = part.num_entitled - part.num_held
                self.promised[group] -= max(due, 0)
                self.taken[group] -= max(-due, 0)
                self.beyond[group] -= part.num_beyond

    def max_tokens(self, pinned: Sequence[int], *, width: int = 1) -> int:
        """Tokens that a sequence may have, `width` of which (beams) are there and nobody else.

        Beams share nothing at worst, need a block for the copy at a fork, and keep what is out of the window.
        """
        fewest = sys.maxsize
        for group in self.attention:
            usable = self._store.pools[group].num_total - pinned[group]
            if width > 1:
                usable = usable // width - 1
            elif usable >= self._rest[group] + self.in_flight:
                continue
            fewest = min(fewest, max(usable, 0) * self._size)
        return fewest
