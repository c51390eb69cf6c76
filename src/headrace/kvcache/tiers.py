"""Blocks on their way between tiers: copies in the order of the plan, and transfers beside it.

A copy is ordered before whoever reads or writes its blocks, so it needs no lease on the device for its own sake. Host
blocks of copies, device blocks that are named before they are filled, and both ends of transfers are leased until the
engine reports them: a transfer must not meet a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from headrace.kvcache.claim import Claim
from headrace.kvcache.disk_index import DiskIndex
from headrace.kvcache.fetches import Fetches
from headrace.kvcache.radix import NONE
from headrace.kvcache.settings import CacheSettings
from headrace.kvcache.store import Store
from headrace.seam import DEVICE, DISK, HOST, Ints, PoolSizes, int_rows

AHEAD = 8
"""Victims of each pool that are copied down before their block is wanted."""


class Move(NamedTuple):
    source: int
    """Pool."""
    source_block: int
    target: int
    target_block: int
    node: int
    """What the target becomes a block of, once it is there; NONE for copies, which are named at once."""
    used: int = 0
    """When the source was last used."""


class Tiers:
    def __init__(self, store: Store, sizes: PoolSizes, settings: CacheSettings, section: int, stride: int) -> None:
        """Args: section, stride: ids count in strides, so that they are unique over sections."""
        self._store = store
        self._num_groups = store.num_groups
        self._min_priority = settings.offload_min_priority
        self._copies: list[tuple[int, ...]] = []
        self._transfers: list[tuple[int, ...]] = []
        self._moves: dict[int, Move] = {}
        self._ids: dict[tuple[int, int], int] = {}
        """By (target pool, node): the transfer under way."""
        self._under_way = [0] * len(store.pools)
        """Transfers by source pool."""
        self.fetches = Fetches(store)
        self._stamps: dict[tuple[int, int], int] = {}
        """By (group, disk block)."""
        self._next_id = section
        self._stride = stride
        if self.has_disk:
            name = f"{settings.fingerprint}/{section}" if stride > 1 else settings.fingerprint
            self._disk = DiskIndex(
                sizes.disk_folder, name, store.groups, settings.tokens_per_block, num_blocks=sizes.disk_blocks
            )
            store.on_unname = self._unlist
            if settings.reuse:
                self._load()

    @property
    def _has_host(self) -> bool:
        return self._store.num_tiers > HOST

    @property
    def is_busy(self) -> bool:
        return bool(self._moves)

    @property
    def has_disk(self) -> bool:
        return self._store.num_tiers > DISK

    @property
    def num_under_way(self) -> int:
        """Transfers."""
        return sum(self._under_way)

    def is_under_way(self, target: int, node: int) -> bool:
        """A transfer brings the node's block to this pool, or a copy still fills the one that it has there."""
        block = self._store.block_of(target, node)
        return (target, node) in self._ids or any(
            (move.target, move.target_block) == (target, block) for move in self._moves.values()
        )

    # ---- device blocks -----------------------------------------------------------------------

    def take(self, group: int, count: int) -> list[int]:
        """`count` device blocks with one lease each; the caller knows that they are available."""
        store = self._store
        pool = store.pools[group]
        num_victims = count - len(pool.free)
        if num_victims > 0:
            if self._has_host:
                for victim in islice(pool.eviction_order(), num_victims):
                    self._demote(group, victim)
            store.evict(group, num_victims)
            store.counters.evictions += num_victims
        store.counters.allocated_blocks += count
        store.by_group[group].allocated_blocks += count
        return pool.take(count)

    def _demote(self, group: int, victim: int) -> None:
        """A copy of the plan saves what is about to be overwritten."""
        store, host = self._store, group + self._num_groups
        pool = store.pools[group]
        node, priority = pool.node[victim], pool.priority[victim]
        if victim in pool.passed or priority < self._min_priority or store.block_of(host, node) != NONE:
            return
        block = self._room(host, priority)
        if block == NONE:
            return
        store.name(host, node, block)
        store.keeping.inherit(host, node, group, victim)
        store.note_lease(host, block)
        self._copy(Move(NONE, victim, host, block, NONE), group, DEVICE, HOST)
        store.counters.offload_bytes += store.block_bytes[group]
        store.by_group[group].offload_bytes += store.block_bytes[group]

    def copy(self, group: int, source: int, target: int) -> None:
        """Within the device."""
        store = self._store
        self._copies.append((self._new_id(), group, DEVICE, source, DEVICE, target))
        store.counters.device_copy_bytes += store.block_bytes[group]
        store.by_group[group].device_copy_bytes += store.block_bytes[group]

    def onboard(self, group: int, node: int, block: int) -> None:
        """The device block, which the caller leases, gets what the node's host block holds."""
        store, host = self._store, group + self._num_groups
        source = store.block_of(host, node)
        store.lease(host, source)
        store.lease(group, block)
        self._copy(Move(host, source, group, block, NONE), group, HOST, DEVICE)
        store.counters.onboard_bytes += store.block_bytes[group]
        store.by_group[group].onboard_bytes += store.block_bytes[group]

    def fill(self, group: int, node: int, block: int) -> None:
        """The device block gets what the node has on the device or the host."""
        source = self._store.block_of(group, node)
        if source != NONE:
            self.copy(group, source, block)
        else:
            self.onboard(group, node, block)

    # ---- beside the steps --------------------------------------------------------------------

    def look_ahead(self, spare: Sequence[int]) -> None:
        """Copies down what would be evicted next; `spare` device blocks of each group may be leased for it.

        There is a host tier.
        """
        for group, count in enumerate(spare):
            self._spill(group, count)
        if self.has_disk:
            for host in range(self._num_groups, 2 * self._num_groups):
                self._spill(host, AHEAD)

    def _spill(self, source: int, count: int) -> None:
        store = self._store
        pool, target = store.pools[source], source + self._num_groups
        # Of a small tier only a share, or what is copied down would drive out what was copied just before.
        ahead = min(AHEAD, max(1, store.pools[target].num_total // 4))
        count = min(count, ahead - self._under_way[source])
        if count <= 0 or len(pool.free) >= ahead:
            return
        for block in list(islice(pool.eviction_order(), ahead)):
            node, priority = pool.node[block], pool.priority[block]
            known = store.block_of(target, node) != NONE or (target, node) in self._ids
            if known or block in pool.passed or priority < self._min_priority:
                continue
            if self._holds_copies(source, target):
                return
            room = self._room(target, priority)
            if room == NONE:
                return
            self._transfer(source, block, target, room, node)
            count -= 1
            if not count:
                return

    def send_down(self, source: int, block: int, node: int) -> None:
        """Begins a transfer of a named block to the pool below, which has a free block."""
        target = source + self._num_groups
        (room,) = self._store.pools[target].take(1)
        self._transfer(source, block, target, room, node)

    def _holds_copies(self, source: int, target: int) -> bool:
        """Whether room in the target would come from a block that was itself copied ahead: nothing would be gained."""
        pool = self._store.pools[target]
        victim = NONE if pool.free else next(pool.eviction_order(), NONE)
        return victim != NONE and self._store.block_of(source, pool.node[victim]) != NONE

    def fetch(self, owner: int, wanted: Iterable[tuple[int, int]]) -> bool:
        """Brings blocks of (group, node), those that are only on disk, to the host, for an owner that waits.

        False: there is nothing to wait for, or no room.
        """
        store, num_groups, fetches = self._store, self._num_groups, self.fetches
        places = fetches.fit([(group + num_groups, node) for group, node in wanted])
        away = [(host, node) for host, node in places if store.block_of(host, node) == NONE]
        if not away:
            return False
        fetches.begin(owner, places)
        is_begun = False
        for host, node in away:
            if (host, node) not in self._ids:
                disk = host + num_groups
                source = store.block_of(disk, node)
                room = self._room(host, store.pools[disk].priority[source])
                if room == NONE:
                    break
                self._transfer(disk, source, host, room, node)
                store.counters.prefetched_blocks += 1
                store.by_group[host - num_groups].prefetched_blocks += 1
            fetches.await_move(owner, self._ids[host, node])
            is_begun = True
        if not is_begun:
            fetches.end([owner])
        return is_begun

    def _transfer(self, source: int, block: int, target: int, room: int, node: int) -> None:
        store, num_groups = self._store, self._num_groups
        used = store.pools[source].used[block]
        store.lease(source, block)
        store.note_lease(target, room)
        group, tier, below = source % num_groups, source // num_groups, target // num_groups
        if below == DISK:
            self._stamps[group, room] = self._disk.next_stamp()
        stamp = self._stamps[group, room if below == DISK else block] if DISK in (tier, below) else 0
        move_id = self._new_id()
        self._moves[move_id] = Move(source, block, target, room, node, used)
        self._ids[target, node] = move_id
        self._under_way[source] += 1
        self._transfers.append((move_id, group, tier, block, below, room, stamp))

    # ---- reports -----------------------------------------------------------------------------

    def take_copies(self) -> Ints:
        copies, self._copies = self._copies, []
        return int_rows(copies, 6)  # pyright: ignore[reportArgumentType]

    def take_transfers(self) -> Ints:
        transfers, self._transfers = self._transfers, []
        return int_rows(transfers, 7)  # pyright: ignore[reportArgumentType]

    def finish(self, move_ids: Iterable[int]) -> None:
        """What the engine reports done; ids of other sections are not ours."""
        for move_id in move_ids:
            move = self._moves.pop(move_id, None)
            if move is None:
                continue
            if move.node != NONE:
                self._arrive(move)
            self._give_back(move_id, move)

    def fail(self, move_ids: Iterable[int]) -> None:
        """Transfers whose target holds nothing."""
        store, num_groups = self._store, self._num_groups
        for move_id in move_ids:
            move = self._moves.pop(move_id, None)
            if move is None:
                continue
            store.counters.failed_transfers += 1
            if move.source >= DISK * num_groups and store.pools[move.source].node[move.source_block] != NONE:
                store.unname(move.source, move.node)
            self._give_back(move_id, move)

    def _arrive(self, move: Move) -> None:
        """The target of a transfer is named, unless its source lost the name meanwhile."""
        store, num_groups = self._store, self._num_groups
        if store.pools[move.source].node[move.source_block] != move.node:
            return
        if store.block_of(move.target, move.node) != NONE:
            return
        store.name(move.target, move.node, move.target_block)
        store.keeping.inherit(move.target, move.node, move.source, move.source_block)
        group, counters = move.source % num_groups, store.counters
        num_bytes = store.block_bytes[group]
        if move.target >= DISK * num_groups:
            counters.disk_write_bytes += num_bytes
            stamp = self._stamps[group, move.target_block]
            self._disk.stored(store.index, move.node, group=group, block=move.target_block, stamp=stamp)
        elif move.source >= DISK * num_groups:
            counters.disk_read_bytes += num_bytes
        else:
            counters.offload_bytes += num_bytes
            store.by_group[group].offload_bytes += num_bytes

    def _give_back(self, move_id: int, move: Move) -> None:
        store = self._store
        if move.node != NONE:
            del self._ids[move.target, move.node]
            self._under_way[move.source] -= 1
            self.fetches.moved(move_id, (move.target, move.node))
        if move.source != NONE:
            store.unlease(move.source, move.source_block)
            pool = store.pools[move.source]
            if move.node != NONE and not pool.leases[move.source_block] and pool.node[move.source_block] != NONE:
                pool.put_back(move.source_block, move.used)  # being copied is no use
        if move.target_block != NONE:
            store.unlease(move.target, move.target_block)

    def close(self) -> None:
        if self.has_disk:
            self._disk.close()

    # ---- room --------------------------------------------------------------------------------

    def _room(self, pool_number: int, priority: int) -> int:
        """A leased block of a lower tier for something of this priority, or NONE."""
        store = self._store
        pool = store.pools[pool_number]
        if not pool.free:
            victim = next(pool.eviction_order(), NONE)
            if victim == NONE or pool.priority[victim] > priority:
                return NONE
            store.on_unname(pool_number, victim)
            store.evict(pool_number, 1)
        return pool.take(1)[0]

    def _unlist(self, pool_number: int, block: int) -> None:
        """A block is about to lose its name: on disk that has to be noted."""
        group = pool_number - DISK * self._num_groups
        if group >= 0:
            self._disk.removed(group, block)

    def _copy(self, move: Move, group: int, tier: int, below: int) -> None:
        move_id = self._new_id()
        self._moves[move_id] = move
        self._copies.append((move_id, group, tier, move.source_block, below, move.target_block))

    def _new_id(self) -> int:
        move_id = self._next_id
        self._next_id += self._stride
        return move_id

    def _load(self) -> None:
        """Names what an earlier run left on disk."""
        store, index = self._store, self._store.index
        records = self._disk.load()
        base = DISK * self._num_groups
        nodes: list[int] = []
        depths: list[int] = []
        for record in records:
            parent = index.root(record.space) if record.parent == NONE else nodes[record.parent]
            nodes.append(index.descend(parent, record.key))
            depths.append(0 if record.parent == NONE else depths[record.parent] + 1)
            index.pin(nodes[-1])
        for group, pool in enumerate(store.tier(DISK)):
            pool.take_these(kept.block for record in records for kept in record.blocks if kept.group == group)
        for node, record, depth in reversed(list(zip(nodes, records, depths, strict=True))):
            for group, block, stamp in record.blocks:
                store.name(base + group, node, block, claim=Claim(record.space), at=depth)
                self._stamps[group, block] = stamp
                store.pools[base + group].unlease(block)
        for node in nodes:
            index.unpin(node)
