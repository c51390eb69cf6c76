"""The cache recounted from scratch: what every counter, ring, reference and name should be.

Each function raises AssertionError with the block, node or owner that disagrees, also under `python -O`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.kvcache.pool import MAX_PRIORITY, NO_NODE, BlockPool
from headrace.kvcache.promises import Promises
from headrace.kvcache.radix import DEAD, MANY, NONE, RadixIndex
from headrace.kvcache.store import Store
from headrace.kvcache.table import NEVER, Table
from headrace.seam import DUMMY_BLOCK


def check_cache(store: Store, tables: Mapping[int, Table], promises: Promises) -> None:
    pools, index, num_groups = store.pools, store.index, store.num_groups
    for number, pool in enumerate(pools):
        try:
            check_pool(pool)
            check_leases(pool, _holders(number, tables if number < num_groups else {}, store.extra_leases))
        except AssertionError as error:
            tier = ("", " on the host", " on disk")[number // num_groups]
            raise AssertionError(f"group {number % num_groups}{tier}: {error}") from None
    check_index(index, tables, store.num_pins)
    check_names(pools, index)
    for owner, table in tables.items():
        try:
            check_table(table, pools, index, promises.attention)
        except AssertionError as error:
            raise AssertionError(f"owner {owner}: {error}") from None
    check_positions(tables)
    check_promises(tables, promises)


def check_pool(pool: BlockPool) -> None:
    """Each block is free, cached or leased, and only one of them."""
    free = set(pool.free)
    _require(len(free) == len(pool.free), f"blocks are twice on the free stack: {_twice(pool.free)}")
    _require(all(DUMMY_BLOCK < block < pool.num_blocks for block in free), f"no such block is free: {sorted(free)}")
    cached = set(_check_rings(pool))
    _require(len(cached) == pool.num_cached, f"{len(cached)} blocks in the eviction queue, {pool.num_cached} counted")
    _require(not free & cached, f"blocks are both free and cached: {sorted(free & cached)}")
    num_leased = 0
    for block in range(1, pool.num_blocks):
        leases = pool.leases[block]
        if leases < 0:
            raise AssertionError(f"block {block} has {leases} leases")
        if leases and (block in free or block in cached):
            raise AssertionError(f"block {block} is {'free' if block in free else 'cached'} with {leases} leases")
        if not leases and block not in free and block not in cached:
            raise AssertionError(f"block {block} is lost: neither free, cached nor leased")
        num_leased += leases > 0
    _require(DUMMY_BLOCK not in cached and pool.leases[DUMMY_BLOCK] == 0, "the dummy block is in use")
    _require(all(pool.node[block] == NO_NODE for block in free), "a free block has a node")
    _require(all(pool.node[block] != NO_NODE for block in cached), "a cached block has no node")
    total = len(free) + len(cached) + num_leased
    _require(total == pool.num_total, f"free + cached + leased blocks are {total}, not {pool.num_total}")


def _check_rings(pool: BlockPool) -> list[int]:
    cached: list[int] = []
    for level in range(MAX_PRIORITY + 1):
        end = pool.num_blocks + level
        block = pool.next[end]
        if block == end == pool.prev[end] and not pool.levels >> level & 1:
            continue
        _require(bool(pool.levels >> level & 1) == (block != end), f"level {level}: the mask is wrong")
        before = end
        while block != end:
            _require(block < pool.num_blocks and pool.prev[block] == before, f"level {level}: broken at block {block}")
            _require(pool.priority[block] == level, f"block {block} of priority {pool.priority[block]} is in {level}")
            cached.append(block)
            _require(len(cached) < pool.num_blocks, f"level {level}: the ring never ends")
            before, block = block, pool.next[block]
        _require(pool.prev[end] == before, f"level {level}: broken at its end")
    return cached


def check_leases(pool: BlockPool, holders: Counter[int]) -> None:
    """The leases of each block are those of the tables that hold it and the extra ones."""
    for block in range(pool.num_blocks):
        leases = pool.leases[block]
        if leases != holders[block]:
            raise AssertionError(f"block {block} has {leases} leases, {holders[block]} are accounted for")
    total_leases = sum(pool.leases)
    _require(total_leases == pool.num_leases, f"{total_leases} leases, {pool.num_leases} counted")


def _holders(group: int, tables: Mapping[int, Table], extra_leases: Mapping[tuple[int, int], int]) -> Counter[int]:
    holders: Counter[int] = Counter()
    for table in tables.values():
        holders.update(block for block in table.parts[group].blocks if block != DUMMY_BLOCK)
    for (held, block), count in extra_leases.items():
        if held == group:
            holders[block] += count
    return holders


def check_index(index: RadixIndex, tables: Mapping[int, Table], others: Mapping[int, int]) -> None:
    """Parents, children, edges and use counts agree, and every node hangs from a root."""
    pins = Counter(table.cursor for table in tables.values())
    pins.update(others)
    reached: set[int] = set()
    for space, root in index.roots.items():
        _require(index.spaces.get(root) == space and index.parent[root] == NONE, f"root {root} isn't of {space}")
        below = [root]
        for node in below:
            if node in reached:
                raise AssertionError(f"node {node} has two parents")
            reached.add(node)
            children = _check_children(index, node)
            uses = len(children) + pins[node] + sum(blocks[node] != NONE for blocks in index.blocks)
            if not index.uses[node] == uses > 0:
                raise AssertionError(f"node {node} counts {index.uses[node]} uses, has {uses}")
            below += children
    _require(len(index.spaces) == len(index.roots), "a namespace has no root")
    spare = set(index.spare)
    _require(len(spare) == len(index.spare) and not spare & reached, "a spare node is in use or twice spare")
    _require(all(index.uses[node] == DEAD for node in spare), "a spare node has uses")
    _require(len(spare) + len(reached) == len(index.key), "nodes are cut off from their root")


def _check_children(index: RadixIndex, node: int) -> list[int]:
    children = index.children(node)
    forked = index.child[node] == MANY
    if not forked == (node in index.forks) == (len(children) > 1):
        raise AssertionError(f"node {node}: the form of its children is wrong")
    for child in children:
        key = index.key[child]
        if index.parent[child] != node:
            raise AssertionError(f"node {child} is a child of {node}, its parent is {index.parent[child]}")
        if not key or (forked and index.forks[node].get(key) != child):
            raise AssertionError(f"node {child} isn't where its edge leads")
        if len(key) < 4 * index.tokens_per_block and index.child[child] != NONE:
            raise AssertionError(f"node {child} has children, but less than a block of tokens")
    return children


def check_names(pools: Sequence[BlockPool], index: RadixIndex) -> None:
    """A node names a block exactly when the block names the node."""
    for group, (pool, blocks) in enumerate(zip(pools, index.blocks)):
        for node, block in enumerate(blocks):
            named = pool.node[block] if 0 < block < pool.num_blocks else NO_NODE
            if block != NONE and (named != node or index.uses[node] == DEAD):
                raise AssertionError(f"group {group}: node {node} names block {block}, which names node {named}")
        for block, node in enumerate(pool.node):
            named = blocks[node] if 0 <= node < len(blocks) else NONE
            if node != NO_NODE and named != block:
                raise AssertionError(f"group {group}: block {block} names node {node}, which names block {named}")


def check_table(table: Table, pools: Sequence[BlockPool], index: RadixIndex, attention: Sequence[int]) -> None:
    """The lists are of one length, and each indexed entry is its node's block or a block without a node."""
    count, size = table.num_blocks, index.tokens_per_block
    parts = [table.parts[group] for group in attention]
    _require(all(len(part.blocks) == count for part in parts), "the tables differ in length")
    _require(table.capacity == count * size, f"capacity {table.capacity} with {count} blocks")
    _require(table.num_announced <= count and table.num_indexed <= count, "the table is shorter than its marks")
    for part in parts:
        held = [block for block in part.blocks if block != DUMMY_BLOCK]
        _require(len(set(held)) == len(held), f"blocks are twice in the table: {_twice(held)}")
        _require(len(held) == part.num_held, f"{len(held)} blocks held, {part.num_held} counted")
        _require(DUMMY_BLOCK not in part.blocks[part.first :], "an entry in the window is the dummy block")
    if table.cursor == NONE:
        _require(table.num_indexed == 0 and table.index_at == NEVER, "no cursor, but indexed blocks")
        return
    _require(table.index_at in (NEVER, (table.num_indexed + 1) * size), f"the next commit is at {table.index_at}")
    node = table.cursor
    for at in range(table.num_indexed - 1, -1, -1):
        for group, part in zip(attention, parts):
            block = part.blocks[at]
            named = pools[group].node[block]
            _require(
                named in (node, NO_NODE),
                f"entry {at} of group {group} is block {block} of node {named}, the owner's tokens are at {node}",
            )
        node = index.parent[node]
    _require(index.parent[node] == NONE, f"the cursor isn't {table.num_indexed} blocks below a root")


def check_promises(tables: Mapping[int, Table], promises: Promises) -> None:
    """Nobody holds more than it was promised or all together may, and what is still due is what is counted."""
    for group in promises.attention:
        due = taken = beyond = 0
        for owner, table in tables.items():
            part = table.parts[group]
            if part.num_entitled:
                more = part.num_held - part.num_entitled
                due += max(-more, 0)
                taken += max(more, 0)
                beyond += part.num_beyond
                if more > (promises.in_flight if table.grows else min(part.num_beyond, promises.in_flight)):
                    raise AssertionError(
                        f"owner {owner} holds {part.num_held} blocks, {part.num_entitled} are promised"
                    )
        found, counted = (due, taken, beyond), (promises.promised[group], promises.taken[group], promises.beyond[group])
        _require(found == counted, f"group {group}: {found} blocks are promised, taken and beyond, not {counted}")
        _require(
            taken <= promises.in_flight, f"group {group}: {taken} blocks are taken for at most {promises.in_flight}"
        )


def check_positions(tables: Mapping[int, Table]) -> None:
    """Owners that share a block have it at the same index."""
    seen: dict[tuple[int, int], int] = {}
    for owner, table in tables.items():
        for group, mine in enumerate(table.blocks):
            for at, block in enumerate(mine):
                if block == DUMMY_BLOCK:
                    continue
                other = seen.setdefault((group, block), at)
                if other != at:
                    raise AssertionError(f"block {block} of group {group} is entry {at} of owner {owner}, also {other}")


def _twice(blocks: Sequence[int]) -> list[int]:
    return [block for block, count in Counter(blocks).items() if count > 1]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
