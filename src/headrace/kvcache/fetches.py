"""Blocks that are brought from disk to the host for owners that wait, and held there until these are admitted.

Without the hold, what running requests send down to the host would drive out what a queued one has just got, the front
of its prefix first, and all of it would have been read for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.kvcache.radix import NONE
from headrace.kvcache.store import Store
from headrace.seam import HOST

FETCH_TIMEOUT_S = 5.0
"""A request that waits longer for its blocks on disk computes their tokens."""

Place = tuple[int, int]
"""Host pool and node."""


@dataclass(slots=True)
class Fetch:
    deadline_s: float
    blocks: dict[Place, int] = field(default_factory=dict[Place, int])
    """Leased, in the order of the prefix; NONE: on its way."""
    moves: set[int] = field(default_factory=set[int])
    """Transfers it waits for."""


class Fetches:
    """All owners together drive others out of at most half of a host pool; one alone may do so with all of it."""

    def __init__(self, store: Store) -> None:
        self.is_full = False
        """Something didn't fit in beside what is held; True until some of that is given back."""
        self._store = store
        self._fetches: dict[int, Fetch] = {}
        self._num_wanting: Counter[Place] = Counter()
        """By what is held or on its way: owners."""
        self._num_places = [0] * store.num_groups
        """Of these, by group."""
        self._arrived: list[int] = []
        self._needs_end = any(spec.window is not None or spec.is_recurrent for spec in store.groups)

    def fit(self, wanted: Sequence[Place]) -> Sequence[Place]:
        """The first of them that there is room for; all or none where a prefix is of no use without its last blocks."""
        store, first = self._store, HOST * self._store.num_groups
        room = [self._room(host) for host in range(first, first + store.num_groups)]
        for count, place in enumerate(wanted):
            if place in self._num_wanting:
                continue
            room[place[0] - first] -= 1
            if room[place[0] - first] < 0:
                self.is_full = bool(self._num_wanting)
                return [] if self._needs_end else wanted[:count]
        return wanted

    def _room(self, host: int) -> int:
        pool = self._store.pools[host]
        if not self._num_wanting:
            return pool.num_available
        share = pool.num_total // 2 - self._num_places[host % self._store.num_groups]
        return min(pool.num_available, max(pool.num_free, share))

    def begin(self, owner: int, wanted: Sequence[Place]) -> None:
        """Holds what is on the host already."""
        assert owner not in self._fetches, f"owner {owner} waits for its blocks already"
        fetch = self._fetches[owner] = Fetch(self._store.keeping.now_s + FETCH_TIMEOUT_S)
        for place in wanted:
            self._count(place, 1)
            fetch.blocks[place] = self._hold(place)

    def has(self, owner: int) -> bool:
        """The owner's blocks are held or on their way here."""
        return owner in self._fetches

    def await_move(self, owner: int, move_id: int) -> None:
        self._fetches[owner].moves.add(move_id)

    def moved(self, move_id: int, place: Place) -> None:
        """A transfer is over, and the node has a block there if it worked."""
        for owner, fetch in list(self._fetches.items()):
            if move_id not in fetch.moves:
                continue
            fetch.moves.discard(move_id)
            fetch.blocks[place] = self._hold(place)
            if fetch.blocks[place] == NONE:
                del fetch.blocks[place]
                self._count(place, -1)
            if not fetch.moves:
                self._arrived.append(owner)
                if not fetch.blocks:
                    del self._fetches[owner]

    def _hold(self, place: Place) -> int:
        host, node = place
        block = self._store.block_of(host, node)
        if block != NONE:
            self._store.lease(host, block)
        return block

    def _count(self, place: Place, change: int) -> None:
        before = self._num_wanting[place]
        self._num_wanting[place] = before + change
        if not before or not before + change:
            self._num_places[place[0] % self._store.num_groups] += change
        if not before + change:
            del self._num_wanting[place]
            self.is_full = False

    def take_arrived(self) -> list[int]:
        """Owners whose blocks have come, or failed to, or took too long."""
        now_s = self._store.keeping.now_s
        late = [owner for owner, fetch in self._fetches.items() if fetch.moves and fetch.deadline_s <= now_s]
        self.end(late)
        arrived, self._arrived = self._arrived + late, []
        return arrived

    def end(self, owners: Iterable[int]) -> None:
        """They are admitted, or wait no longer. From the last block to the first, so that a prefix is never evicted
        before what follows it."""
        for owner in owners:
            fetch = self._fetches.pop(owner, None)
            if fetch is None:
                continue
            for place, block in reversed(fetch.blocks.items()):
                self._count(place, -1)
                if block != NONE:
                    self._store.unlease(place[0], block)
