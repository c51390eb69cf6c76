"""Owners' tables from one plan to the next: they grow, get names, slide along the window, fork and end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from headrace.kvcache.naming import Naming
from headrace.kvcache.promises import Promises
from headrace.kvcache.radix import NONE, Tokens
from headrace.kvcache.reuse import first_needed, num_sinks
from headrace.kvcache.snapshots import Snapshots
from headrace.kvcache.store import Store
from headrace.kvcache.table import NEVER, Part, Table
from headrace.kvcache.tiers import Tiers
from headrace.kvcache.turns import AllReusable
from headrace.seam import DUMMY_BLOCK, GroupSpec


class NoBlocks(RuntimeError):
    """There are not enough free and evictable blocks. Nothing was changed."""


class Growth:
    """What `KvCache` says of its methods of the same names."""

    def __init__(
        self,
        store: Store,
        tables: dict[int, Table],
        *,
        tiers: Tiers,
        promises: Promises,
        naming: Naming,
        snapshots: Snapshots,
        policy: AllReusable,
    ) -> None:
        self.naming = naming
        self._store = store
        self._tables = tables
        self._index = store.index
        self._tiers = tiers
        self._promises = promises
        self._snapshots = snapshots
        self._policy = policy
        self._size = store.settings.tokens_per_block
        self._windows = [
            (group, spec)
            for group, spec in enumerate(store.groups)
            if spec.window is not None and not spec.is_recurrent
        ]

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    def extend_each(self, wants: Iterable[tuple[int, int, int]]) -> set[int]:
        promises, attention, size = self._promises, self._promises.attention, self._size
        refused: set[int] = set()
        granted: list[tuple[Table, int]] = []
        total = num_generated = 0
        unpromised = promises.unpromised()
        for owner, num_tokens, headroom in wants:
            table = self._tables[owner]
            num_blocks = -(-num_tokens // size)
            count = num_blocks - table.num_blocks
            if count <= 0:
                continue
            # The room is never less than what nobody was promised, and mostly that is enough.
            if count + headroom + total > unpromised and count > promises.room(table) - headroom - total:
                refused.add(owner)
                continue
            for group in attention:
                promises.hold(table, group, count)
            table.num_blocks = num_blocks
            table.capacity = num_blocks * size
            granted.append((table, count))
            total += count
            num_beyond = num_blocks - -(-table.claim.prompt_len // size)
            if num_beyond > 0:
                num_generated += min(count, num_beyond)
        for group in attention if granted else ():
            blocks = iter(self._tiers.take(group, total))
            for table, count in granted:
                table.parts[group].blocks += islice(blocks, count)
            self._store.by_group[group].gen_allocated_blocks += num_generated
        return refused

    def take_new_blocks(self, slots: Mapping[int, int]) -> list[list[int]]:
        new: list[list[int]] = [[] for _ in self._store.groups]
        for owner, slot in slots.items():
            table = self._tables[owner]
            first = table.num_announced
            table.num_announced = table.num_blocks
            for triples, part in zip(new, table.parts):
                for at, block in enumerate(part.blocks[first:], first):
                    triples += slot, at, block
            if table.gone:
                for group, at in table.gone:
                    if at < first:
                        new[group] += slot, at, DUMMY_BLOCK
                table.gone.clear()
        return new

    def commit(self, owner: int, tokens: Tokens, num_computed: int) -> int:
        table = self._tables[owner]
        if num_computed >= table.index_at:
            assert num_computed <= len(tokens) and num_computed <= table.capacity, (num_computed, table.capacity)
            first = table.num_indexed
            path = self.naming.index(table, tokens, num_computed // self._size)
            if table.saved:
                self._snapshots.commit(table, path, first, table.claim)
        if num_computed >= table.slide_at:
            self._slide(table, num_computed)
        return table.commit_at

    def _slide(self, table: Table, num_computed: int) -> None:
        """Entries that neither the next query nor one in flight can reach become the dummy block.

        Most of them are of no use to anybody: a prompt is seldom left half-way. They are evicted first, or a long one
        would drive out the windows at which sequences ended, without which nothing of these is found.
        """
        size = self._size
        for group, spec in self._windows:
            part, pool = table.parts[group], self._store.pools[group]
            first = min(first_needed(spec, num_computed, size), table.num_blocks)
            start = max(part.first, num_sinks(spec, size))
            part.first = max(part.first, first)
            gone = [at for at in range(start, first) if part.blocks[at] != DUMMY_BLOCK]
            for at in gone:
                if self._is_landmark(table, spec, at):
                    pool.unlease(part.blocks[at])
                else:
                    pool.unlease_first(part.blocks[at])
                part.blocks[at] = DUMMY_BLOCK
                table.gone.append((group, at))
            self._promises.hold(table, group, -len(gone))
        self.plan_slide(table)

    def _is_landmark(self, table: Table, spec: GroupSpec, at: int) -> bool:
        """Whether it is in reach of who goes on where that is likely, or was told to stay."""
        if table.claim.retention is not None:
            return True
        size = self._size
        return any(first_needed(spec, end * size, size) <= at < end for end in table.landmarks or ())

    def plan_slide(self, table: Table) -> None:
        if table.slides and self._windows:
            ends = [
                (table.parts[group].first + 1) * self._size + (spec.window or 0) - 1 for group, spec in self._windows
            ]
            table.slide_at = min(ends, default=NEVER)

    def release(self, owner: int, *, index: bool, tokens: Tokens, num_computed: int, final: bool) -> None:
        table = self._tables[owner]
        if not index and table.num_indexed > table.num_reused:
            self.forget(self._index.ancestor(table.cursor, table.num_indexed - table.num_reused - 1))
        elif index:
            self.naming.suffix(table, tokens, num_computed)
        del self._tables[owner]
        self._snapshots.drop(owner, table)
        self._promises.end(table)
        depth = table.num_indexed
        for pool, part in zip(self._store.pools, table.parts):
            pool.unlease_all([block for block in part.blocks[: depth - 1 if depth else None : -1] if block])
        for group in self._promises.attention:
            self._give_back(group, table)
        if table.cursor != NONE:
            if final:
                self._policy.ended(table.claim.space, table.cursor)
            self._index.unpin(table.cursor)

    def _give_back(self, group: int, table: Table) -> None:
        """The indexed blocks' leases, from the last to the first: a prefix is never evicted before what follows it."""
        pool, mine, parent = self._store.pools[group], table.parts[group].blocks, self._index.parent
        names, node = pool.node, table.cursor
        due: list[int] = []
        for at in range(table.num_indexed - 1, -1, -1):
            block = mine[at]
            if block:
                if names[block] != node:
                    pool.unlease_all(due)  # all that comes before it is used before it
                    due.clear()
                    self.naming.use(group, node, block, table, at)
                due.append(block)
            node = parent[node]
        pool.unlease_all(due)

    def fork(self, parent: int, child: int, num_tokens: int) -> list[tuple[int, int, int]]:
        assert child not in self._tables, f"owner {child} is admitted already"
        origin, size = self._tables[parent], self._size
        assert num_tokens <= origin.capacity, (num_tokens, origin.capacity)
        num_full, rest = divmod(num_tokens, size)
        if rest and not all(self._store.pools[group].num_available for group in self._promises.attention):
            raise NoBlocks(f"no block for the copy of a partial block of owner {parent}")
        parts = tuple([Part(part.blocks[:num_full], part.first) for part in origin.parts])
        table = Table(origin.claim, parts, NONE, NEVER, landmarks=origin.landmarks, slide_at=origin.slide_at)
        table.num_reused = min(origin.num_reused, num_full)
        table.num_blocks = num_full + (rest > 0)
        table.capacity = table.num_blocks * size
        if origin.cursor != NONE:
            table.num_indexed = min(origin.num_indexed, num_full)
            table.cursor = self._index.ancestor(origin.cursor, origin.num_indexed - table.num_indexed)
            if origin.index_at != NEVER:
                table.index_at = (table.num_indexed + 1) * size
            self._index.pin(table.cursor)
        copies: list[tuple[int, int, int]] = []
        for group in self._promises.attention:
            part, theirs = parts[group], origin.parts[group].blocks
            held = [block for block in part.blocks if block]
            self._store.pools[group].lease_all(held)
            if rest:
                part.blocks += self._tiers.take(group, 1)
                copies.append((group, theirs[num_full], part.blocks[num_full]))
            part.num_held = len(held) + (rest > 0)
        self._tables[child] = table
        return copies

    def forget(self, top: int) -> None:
        """Takes a node and all below it out of the index. Owners whose tables pass there index nothing more."""
        nodes = self._index.subtree(top)
        doomed = set(nodes)
        for table in self._tables.values():
            if table.cursor in doomed:
                self._cut(table, top)
        self._store.forget(nodes)

    def _cut(self, table: Table, top: int) -> None:
        """The table's indexed blocks end above `top` for good."""
        index, cursor = self._index, table.cursor
        above = index.parent[top]
        node = cursor
        while node != above and table.num_indexed:
            node = index.parent[node]
            table.num_indexed -= 1
        table.cursor = above
        table.index_at = NEVER
        if above != NONE:
            index.pin(above)
        index.unpin(cursor)
