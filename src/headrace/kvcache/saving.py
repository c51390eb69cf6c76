"""What only this process's memory holds goes to disk while nobody runs, so that the next process finds it."""

from __future__ import annotations

from collections import deque
from itertools import islice

from headrace.kvcache.radix import NONE
from headrace.kvcache.store import Store
from headrace.kvcache.tiers import Tiers
from headrace.seam import DEVICE, DISK, HOST

MAX_UNDER_WAY = 16
MAX_LOOKED_AT = 64
"""Host victims that are looked at for one whose place can be taken."""


class NoSaving:
    """Without a disk there is nothing to do."""

    @property
    def has_more(self) -> bool:
        return False

    def step(self, *, is_idle: bool) -> None:
        pass


class Saving(NoSaving):
    """One round an idle time, over what was cached when it began: the most recent first, and a prefix before what
    follows it. A block goes up to the host, if it isn't there, and from there to disk, as long as that has free room.
    """

    def __init__(self, store: Store, tiers: Tiers, *, min_priority: int) -> None:
        self._store = store
        self._tiers = tiers
        self._min_priority = min_priority
        self._is_due = True
        self._nodes: deque[int] = deque()
        self._on_the_way: deque[int] = deque()
        """Nodes whose blocks have been sent to the host."""

    @property
    def has_more(self) -> bool:
        return self._is_due or bool(self._nodes or self._on_the_way)

    def step(self, *, is_idle: bool) -> None:
        """Once a plan: begins some transfers."""
        if not is_idle:
            self._is_due = True
            self._nodes.clear()
            self._on_the_way.clear()
            return
        if self._is_due:
            self._is_due = False
            self._nodes.extend(self._worth_saving())
        for _ in range(len(self._on_the_way)):
            node = self._on_the_way.popleft()
            if any(self._tiers.is_under_way(host, node) for host in self._pools(HOST)):
                self._on_the_way.append(node)
            else:
                self._write(node)
        while self._nodes and self._tiers.num_under_way < MAX_UNDER_WAY:
            if not self._raise(self._nodes[0]):
                if not self._tiers.num_under_way:
                    self._nodes.clear()  # there will be no room either
                return
            self._on_the_way.append(self._nodes.popleft())

    def _pools(self, tier: int) -> range:
        count = self._store.num_groups
        return range(tier * count, (tier + 1) * count)

    def _worth_saving(self) -> list[int]:
        store = self._store
        found: dict[int, None] = {}
        for number in (*self._pools(DEVICE), *self._pools(HOST)):
            pool = store.pools[number]
            for block in reversed(list(pool.eviction_order())):
                if pool.priority[block] >= self._min_priority and block not in pool.passed:
                    found[pool.node[block]] = None
        return [node for node in found if any(store.block_of(disk, node) == NONE for disk in self._pools(DISK))]

    def _raise(self, node: int) -> bool:
        """Sends to the host what isn't there nor on disk; False: the host has no room now."""
        store = self._store
        for device, host, disk in zip(self._pools(DEVICE), self._pools(HOST), self._pools(DISK)):
            block = store.block_of(device, node)
            known = store.block_of(host, node) != NONE or store.block_of(disk, node) != NONE
            is_passed = block in store.pools[device].passed
            if block == NONE or is_passed or known or self._tiers.is_under_way(host, node):
                continue
            if not self._make_room(host, disk):
                return False
            self._tiers.send_down(device, block, node)
        return True

    def _make_room(self, host: int, disk: int) -> bool:
        pool = self._store.pools[host]
        if pool.free:
            return True
        for victim in islice(pool.eviction_order(), MAX_LOOKED_AT):
            if self._store.block_of(disk, pool.node[victim]) != NONE:
                self._store.unname(host, pool.node[victim])
                return True
        return False

    def _write(self, node: int) -> None:
        store = self._store
        for host, disk in zip(self._pools(HOST), self._pools(DISK)):
            block = store.block_of(host, node)
            known = store.block_of(disk, node) != NONE or self._tiers.is_under_way(disk, node)
            if block != NONE and not known and store.pools[disk].free:
                self._tiers.send_down(host, block, node)
