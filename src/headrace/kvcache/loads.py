"""Blocks that an external store fills, or still reads: leased until the engine reports them.

A load brings whole blocks behind a known prefix, for a request that waits in the queue. They get their names once they
are there; then admission finds them like all others. One that failed leaves nothing: its tokens are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.kvcache.claim import Claim
from headrace.kvcache.lookup import Lookup
from headrace.kvcache.promises import Promises
from headrace.kvcache.radix import NONE, Tokens
from headrace.kvcache.store import Store
from headrace.kvcache.table import Table
from headrace.kvcache.tiers import Tiers
from headrace.seam import DUMMY_BLOCK

LOAD_TIMEOUT_S = 5.0
"""A request that waits longer for a load computes its tokens; what comes later is still named."""

GroupBlocks = tuple[list[int], ...]
"""Per group, the blocks of consecutive places, or NONE."""


class Load(NamedTuple):
    id: int
    first: int
    """Place of its first block in the sequence."""
    blocks: GroupBlocks


class _Under(NamedTuple):
    """A load under way."""

    load: Load
    owner: int
    tokens: Tokens
    claim: Claim
    held: list[tuple[int, int]]
    """(group, block) of the prefix and of what is filled, in order of places."""


class Loads:
    def __init__(
        self, store: Store, tiers: Tiers, lookup: Lookup, promises: Promises, *, section: int, stride: int
    ) -> None:
        """Args: section, stride: ids count down in strides, so that they are unique over sections, and no copy's."""
        self._store = store
        self._tiers = tiers
        self._lookup = lookup
        self._promises = promises
        self._size = store.settings.tokens_per_block
        self._next_id = -1 - section
        self._stride = stride
        self._loads: dict[int, _Under] = {}
        self._kept: dict[int, list[tuple[int, int]]] = {}
        self._deadlines: dict[int, float] = {}
        """Of owners that wait."""
        self._arrived: list[int] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._loads or self._kept)

    def num_known(self, tokens: Tokens, claim: Claim) -> int:
        """Leading whole blocks that are here."""
        return self._lookup.find(tokens, claim).length

    def begin(self, owner: int, tokens: Tokens, claim: Claim, num_blocks: int) -> Load | None:
        """Blocks for `num_blocks` places behind what is here; the owner waits. None: there is no room for them now."""
        store = self._store
        found = self._lookup.find(tokens, claim)
        first, end = found.length, found.length + num_blocks
        assert num_blocks > 0 and len(tokens) >= end * self._size, (first, num_blocks, len(tokens))
        places = [[at for at in self._lookup.needed(group, end) if at >= first] for group in range(store.num_groups)]
        prefix: list[tuple[int, int]] = []
        for group in range(store.num_groups):
            pool, names = store.pools[group], store.index.blocks[group]
            mine = [names[found.path[at]] for at in self._lookup.needed(group, first)]
            is_counted = store.groups[group].window is not None
            num_taken = sum(is_counted or not pool.leases[block] for block in mine)
            if len(places[group]) + num_taken > self._promises.spare(group):
                return None
            prefix += [(group, block) for block in mine]
        for group, block in prefix:  # or the very blocks that are taken now could come from it
            store.lease(group, block)
        blocks = tuple([NONE] * num_blocks for _ in places)
        filled: list[tuple[int, int]] = []
        for group, mine in enumerate(places):
            for at, block in zip(mine, self._tiers.take(group, len(mine)), strict=True):
                store.note_lease(group, block)
                blocks[group][at - first] = block
                filled.append((group, block))
        load = Load(self._new_id(), first, blocks)
        self._loads[load.id] = _Under(load, owner, tokens[: end * self._size], claim, prefix + filled)
        self._deadlines[owner] = store.keeping.now_s + LOAD_TIMEOUT_S
        return load

    def keep(self, table: Table, num_blocks: int) -> int:
        """The table's first blocks stay as they are, also when it has ended. -> the id to be reported."""
        held: list[tuple[int, int]] = []
        for group, part in enumerate(table.parts):
            held += [(group, block) for block in part.blocks[:num_blocks] if block != DUMMY_BLOCK]
        for group, block in held:
            self._store.lease(group, block)
        keep_id = self._new_id()
        self._kept[keep_id] = held
        return keep_id

    def finish(self, ids: Iterable[int], *, worked: bool = True) -> None:
        """Ids of others are ignored."""
        for each in ids:
            under = self._loads.pop(each, None)
            if under is None:
                self._unlease(self._kept.pop(each, []))
                continue
            if worked:
                self._name(under)
            else:
                self._store.counters.failed_transfers += 1
            self._unlease(under.held)
            if self._deadlines.pop(under.owner, None) is not None:
                self._arrived.append(under.owner)

    def abandon(self, owner: int) -> None:
        """The owner waits no longer."""
        self._deadlines.pop(owner, None)

    def take_arrived(self) -> list[int]:
        """Owners whose blocks have come, or failed to, or took too long."""
        late = [owner for owner, deadline_s in self._deadlines.items() if deadline_s <= self._store.keeping.now_s]
        for owner in late:
            del self._deadlines[owner]
        arrived, self._arrived = self._arrived + late, []
        return arrived

    def _name(self, under: _Under) -> None:
        """Nodes that have got other blocks meanwhile keep them."""
        store, index = self._store, self._store.index
        (_, first, blocks), claim = under.load, under.claim
        keys = index.edges(under.tokens, 0, first + len(blocks[0]), claim.media)
        path = index.descend_all(index.root(claim.space), keys)
        index.pin(path[-1])
        for group, mine in enumerate(blocks):
            for at, block in enumerate(mine, first):
                if block != NONE and store.block_of(group, path[at]) == NONE:
                    store.name(group, path[at], block, claim=claim, at=at)
            if claim.retention is not None:
                store.keeping.retain_all(group, path[first:], claim, first)
        index.unpin(path[-1])

    def _unlease(self, held: list[tuple[int, int]]) -> None:
        """From the last block to the first, so that a prefix is never evicted before what follows it."""
        for group, block in reversed(held):
            self._store.unlease(group, block)

    def _new_id(self) -> int:
        new = self._next_id
        self._next_id -= self._stride
        return new
