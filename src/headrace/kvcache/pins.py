"""Prefixes that stay whatever the pressure, by name, up to a share of each pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.kvcache.claim import Claim
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

        It replaces what the name stood for, whose blocks count as given back; refused, it leaves that as it was.

        Args:
            spare: by pool, blocks that may be leased that nobody holds now.
            needs: by group, device blocks that have to be left beside all pins.
        """
        keys = [self._store.index.key[node] for node in path]
        old = self._pins.get(name)
        if old is not None and old.claim.space == claim.space and old.keys == keys:
            return ""
        refusal = self._refusal(wanted, old.blocks if old is not None else [], spare, needs)
        if not refusal:
            new = Pin(claim, keys, wanted)
            self._hold(new)  # before the old one is let go: what both have never loses its lease
            self.unpin(name)
            self._pins[name] = new
        return refusal

    def _refusal(self, wanted: list[Pinned], replaced: list[Pinned], spare: Sequence[int], needs: Sequence[int]) -> str:
        if not wanted:
            return f"its prompt fills no block of {self._store.settings.tokens_per_block} tokens that is in the cache"
        places = {(pool, block) for pool, _, block in wanted}
        new = places - self._counts.keys()
        left = {(pool, block) for pool, _, block in replaced if self._counts[pool, block] == 1} - places
        for pool, most in enumerate(self._max):
            leases = self._store.pools[pool].leases
            mine = [block for where, block in new if where == pool]
            gone = [block for where, block in left if where == pool]
            others = self.num_pinned[pool] - len(gone)
            if others + len(mine) > most:
                return f"pins hold {others} blocks and may hold {most}, it needs {len(mine)} more: unpin some"
            if pool < len(needs) and others + len(mine) > self._store.pools[pool].num_total - needs[pool]:
                return "a request that runs may need its blocks"
            given_back = sum(leases[block] == 1 for block in gone)
            if sum(not leases[block] for block in mine) > spare[pool] + given_back:
                return "its blocks are promised to others"
        return ""

    def _hold(self, pin: Pin) -> None:
        for pool, _, block in pin.blocks:
            count = self._counts.get((pool, block), 0)
            if not count:
                self._store.lease(pool, block)
                self.num_pinned[pool] += 1
            self._counts[pool, block] = count + 1

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
