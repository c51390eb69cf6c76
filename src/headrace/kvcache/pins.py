"""Prefixes that stay whatever the pressure, by name, up to a share of each pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.kvcache.claim import Claim
from headrace.kvcache.radix import NONE
from headrace.kvcache.store import Store
from headrace.types import PinInfo


class Pinned(NamedTuple):
    pool: int
    at: int
    """Place of its node in the path."""
    block: int


class Pin(NamedTuple):
    claim: Claim
    keys: list[bytes]
    """Edges of the whole path."""
    blocks: list[Pinned]


class Pins:
    """Each pinned block has one lease, by however many pins it is held."""

    def __init__(self, store: Store, max_share: float) -> None:
        self._store = store
        self._max = [int(pool.num_total * max_share) for pool in store.pools]
        self._pins: dict[str, Pin] = {}
        self._counts: dict[tuple[int, int], int] = {}
        """By (pool, block): pins."""
        self.num_pinned = [0] * len(store.pools)
        """By pool."""

    def infos(self) -> list[PinInfo]:
        """In the order they were pinned."""
        size = self._store.settings.tokens_per_block
        return [
            PinInfo(name=name, num_tokens=len(pin.keys) * size, num_blocks=len(pin.blocks))
            for name, pin in self._pins.items()
        ]

    def pin(
        self,
        name: str,
        claim: Claim,
        path: Sequence[int],
        wanted: list[Pinned],
        *,
        spare: Sequence[int],
        needs: Sequence[int],
    ) -> str:
        """Holds the blocks of a path under a name; returns why not, or "".

        Args:
            spare: by pool, blocks that may be leased that nobody holds now.
            needs: by group, device blocks that have to be left beside all pins.
        """
        keys = [self._store.index.key[node] for node in path]
        old = self._pins.get(name)
        if old is not None:
            same = old.claim.space == claim.space and old.keys == keys
            return "" if same else "there is a pin of this name: unpin it first"
        refusal = self._refusal(wanted, spare, needs)
        if not refusal:
            self._hold(name, Pin(claim, keys, wanted))
        return refusal

    def _refusal(self, wanted: list[Pinned], spare: Sequence[int], needs: Sequence[int]) -> str:
        if not wanted:
            return "nothing of its prompt is in the cache"
        new = {(pool, block) for pool, _, block in wanted} - self._counts.keys()
        for pool, most in enumerate(self._max):
            mine = [block for where, block in new if where == pool]
            if self.num_pinned[pool] + len(mine) > most:
                return f"pins hold {self.num_pinned[pool]} blocks and may hold {most}, it needs {len(mine)} more"
            if (
                pool < len(needs)
                and self.num_pinned[pool] + len(mine) > self._store.pools[pool].num_total - needs[pool]
            ):
                return "a request that runs may need its blocks"
            if sum(not self._store.pools[pool].leases[block] for block in mine) > spare[pool]:
                return "its blocks are promised to others"
        return ""

    def _hold(self, name: str, pin: Pin) -> None:
        for pool, _, block in pin.blocks:
            count = self._counts.get((pool, block), 0)
            if not count:
                self._store.lease(pool, block)
                self.num_pinned[pool] += 1
            self._counts[pool, block] = count + 1
        self._pins[name] = pin

    def unpin(self, name: str) -> bool:
        """False: there is no such pin."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        for pool, _, block in reversed(pin.blocks):
            self._counts[pool, block] -= 1
            if not self._counts[pool, block]:
                del self._counts[pool, block]
                self.num_pinned[pool] -= 1
                self._store.unlease(pool, block)
        return True

    def restore(self) -> None:
        """After all names were taken: pinned prefixes are found again."""
        index = self._store.index
        for pin in self._pins.values():
            node = index.root(pin.claim.space)
            path: list[int] = []
            for key in pin.keys:
                node = index.descend(node, key)
                index.pin(node)
                path.append(node)
            for pool, at, block in pin.blocks:
                if self._store.block_of(pool, path[at]) == NONE and self._store.pools[pool].node[block] == NONE:
                    self._store.name(pool, path[at], block, claim=pin.claim, at=at)
            for node in path:
                index.unpin(node)
