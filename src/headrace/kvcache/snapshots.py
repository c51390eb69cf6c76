"""Recurrent states at fixed positions: where they are saved, what names them, what a slot begins with.

A snapshot is a block of a recurrent group. It is leased while a plan may still write or read it: from the plan that
saves it until its tokens are committed, and from admission until the plan that restores it is made.
"""

from __future__ import annotations

from bisect import bisect_right

from headrace.kvcache.claim import Claim
from headrace.kvcache.radix import NONE
from headrace.kvcache.settings import CacheSettings
from headrace.kvcache.store import Store
from headrace.kvcache.table import NEVER, Table
from headrace.kvcache.tiers import Tiers
from headrace.seam import Ints, int_rows


def positions(
    settings: CacheSettings, *, prompt_len: int, num_tokens: int, start: int, branch: int = 0
) -> tuple[int, ...]:
    """Where the computation of tokens [start, num_tokens) stops to save states: multiples of the block, ascending.

    `branch`: tokens up to where the prompt leaves a known path; 0 is nowhere.
    """
    size = settings.tokens_per_block
    wanted = {offset // size * size for offset in settings.snapshots_from_start}
    wanted |= {(prompt_len - offset) // size * size for offset in settings.snapshots_from_end}
    if settings.snapshot_interval:
        step = max(size, settings.snapshot_interval // size * size)
        wanted |= set(range(step, num_tokens + 1, step))
    if settings.branch_snapshots:
        wanted.add(branch // size * size)
    return tuple(sorted(position for position in wanted if start < position <= num_tokens))


class Snapshots:
    def __init__(self, store: Store, tiers: Tiers) -> None:
        self._store = store
        self._tiers = tiers
        self._groups = [group for group, spec in enumerate(store.groups) if spec.is_recurrent]
        self._ready: dict[int, list[tuple[int, int]]] = {}
        """By owner without a slot yet: (group, block) to begin with."""
        self._restores: list[tuple[int, int, int]] = []
        self._saves: list[tuple[int, int, int]] = []

    def has_room(self, node: int) -> bool:
        """Whether the states at `node` can be brought to the device."""
        store = self._store
        return all(store.block_of(group, node) != NONE or store.pools[group].num_available for group in self._groups)

    def take(self, owner: int, node: int) -> None:
        """The owner will begin with the states at `node`."""
        store = self._store
        blocks: list[tuple[int, int]] = []
        for group in self._groups:
            block = store.block_of(group, node)
            if block != NONE:
                store.lease(group, block)
            else:
                host = group + store.num_groups
                source = store.block_of(host, node)
                store.lease(host, source)  # taking a block may evict from the host
                block = self._tiers.take(group, 1)[0]
                store.note_lease(group, block)
                self._tiers.onboard(group, node, block)
                store.name(group, node, block)
                store.keeping.inherit(group, node, host, source)
                store.unlease(host, source)
            blocks.append((group, block))
        if blocks:
            self._ready[owner] = blocks

    def begin(self, owner: int, slot: int) -> None:
        """The owner got its slot."""
        self._restores += [(group, block, slot) for group, block in self._ready.pop(owner, ())]

    def take_restores(self) -> Ints:
        restores, self._restores = self._restores, []
        for group, block, _ in restores:
            self._store.unlease(group, block)
        return int_rows(restores, 3)

    def next_stop(self, table: Table, num_planned: int) -> int:
        """The next position where a chunk has to end; NEVER when it may end anywhere."""
        at = bisect_right(table.stops, num_planned)
        return table.stops[at] if at < len(table.stops) else NEVER

    def save(self, table: Table, position: int, slot: int) -> None:
        """The plan's rows bring the slot to `position`: when it is one to stop at, and blocks last, states are kept."""
        store = self._store
        if position not in table.stops or not all(store.pools[group].num_available for group in self._groups):
            return
        saved: list[tuple[int, int]] = []
        for group in self._groups:
            block = self._tiers.take(group, 1)[0]
            store.note_lease(group, block)
            saved.append((group, block))
            self._saves.append((group, slot, block))
        table.saved[position] = saved

    def take_saves(self) -> Ints:
        saves, self._saves = self._saves, []
        return int_rows(saves, 3)

    def commit(self, table: Table, path: list[int], first: int, claim: Claim) -> None:
        """`path` is of the blocks from `first` on, computed now: their snapshots get their names."""
        size, store = self._store.settings.tokens_per_block, self._store
        for position in [at for at in table.saved if first < at // size <= first + len(path)]:
            at = position // size - 1
            node = path[at - first]
            for group, block in table.saved.pop(position):
                if store.block_of(group, node) == NONE:
                    store.name(group, node, block, claim=claim, at=at)
                    store.keeping.retain_all(group, (node,), claim, at)
                store.unlease(group, block)

    def drop(self, owner: int, table: Table) -> None:
        """What the owner saved and didn't commit is worth nothing."""
        for saved in table.saved.values():
            for group, block in saved:
                self._store.unlease(group, block)
        table.saved.clear()
        for group, block in self._ready.pop(owner, ()):
            self._store.unlease(group, block)
