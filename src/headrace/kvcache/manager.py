"""The KV cache of one data-parallel section, as integers: the blocks each owner has, shares, may reuse or waits for.

A block's life: `extend` takes it from its group's pool (evicting the least recently used cached block when none is
free), the engine writes K and V into it, `commit` puts it into the radix index once it is full, `admit` of another
owner may share it, and with its last lease (`release`) it stays cached until it is evicted.

Only one block per group stands in the index for the same tokens in the same namespace. An owner that computed the same
tokens again keeps its own block as well, so a table never changes under a step in flight.
"""

from __future__ import annotations

from dataclasses import asdict

from headrace.kvcache.integrity import check_cache
from headrace.kvcache.pool import BlockPool, num_available
from headrace.kvcache.radix import NONE, Namespace, RadixIndex, Tokens
from headrace.kvcache.stats import CacheStats, Counters
from headrace.kvcache.table import NEVER, Table
from headrace.seam import GroupSpec

Blocks = tuple[list[tuple[int, int]], ...]
"""Per group: (index in the table, block)."""


class NoBlocks(RuntimeError):
    """There are not enough free and evictable blocks. Nothing was changed."""


class KvCache:
    """Blocks, tables and reuse of one section. Calls come from one thread.

    An owner is a request or a beam, any integer. `num_blocks` is per group and counts the dummy block.
    With `reuse` off there is no index: nothing is found, nothing stays cached.
    Source of the idea: RadixAttention (Zheng et al., 2024) over the paged blocks of PagedAttention (Kwon et al., 2023).
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        *,
        tokens_per_block: int,
        num_blocks: tuple[int, ...],
        reuse: bool = True,
        revision: str = "",
    ) -> None:
        if tokens_per_block < 1 or tokens_per_block & (tokens_per_block - 1):
            raise ValueError(f"tokens_per_block is {tokens_per_block}: use a power of two, such as 32")
        if not groups or len(groups) != len(num_blocks):
            raise ValueError(f"num_blocks has {len(num_blocks)} entries for {len(groups)} layer groups: give each one")
        if min(num_blocks) < 2:
            raise ValueError(f"num_blocks is {num_blocks}: each group needs 2 or more, the dummy block is one of them")
        self.groups = groups
        self.tokens_per_block = tokens_per_block
        self.reuse = reuse
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.index = RadixIndex(tokens_per_block, num_pools=len(groups))
        self.tables: dict[int, Table] = {}
        self.extra_leases: dict[tuple[int, int], int] = {}
        """By (group, block): leases that no table holds."""
        self.counters = Counters()
        self._base = Namespace(revision=revision, dtypes=tuple(group.dtype for group in groups))

    @property
    def stats(self) -> CacheStats:
        pools = self.pools
        return CacheStats(
            num_total=tuple(pool.num_total for pool in pools),
            num_free=tuple(pool.num_free for pool in pools),
            num_cached=tuple(pool.num_cached for pool in pools),
            num_leased=tuple(pool.num_leased for pool in pools),
            **asdict(self.counters),
        )

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks of each group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def num_available(self) -> int:
        """Blocks of each group that could be allocated now: free and evictable ones, in the scarcest group."""
        return num_available(self.pools)

    def match(self, tokens: Tokens, *, salt: str = "", limit: int | None = None) -> int:
        """Leading tokens that could be reused now: whole blocks, at most `limit`, and never the last token.

        Changes nothing, the eviction order included.
        """
        return len(self._reusable(tokens, salt, limit)) * self.tokens_per_block

    def can_admit(
        self, tokens: Tokens, *, salt: str = "", num_tokens: int, headroom: int = 0, reuse: bool = True
    ) -> bool:
        """Whether `admit` and `extend` to `num_tokens` in all would succeed and leave `headroom` blocks available.

        `reuse` as it will be given to `admit`.
        """
        num_prompt_blocks = (len(tokens) - 1) // self.tokens_per_block
        wanted = self.blocks_needed(num_tokens)
        spare = self.num_available() - headroom
        # `admit` leases all it finds, even beyond num_tokens.
        if max(wanted, num_prompt_blocks) <= spare:
            return True
        if not (self.reuse and reuse) or wanted - num_prompt_blocks > spare:
            return False
        path = self._reusable(tokens, salt, None)
        wanted = max(wanted, len(path))
        for pool, blocks in zip(self.pools, self.index.blocks):
            num_held = sum(pool.leases[blocks[node]] > 0 for node in path)
            if wanted - num_held > pool.num_available - headroom:
                return False
        return True

    def admit(self, owner: int, tokens: Tokens, *, salt: str = "", reuse: bool = True) -> int:
        """Starts the owner's tables with the blocks that hold a prefix of `tokens`; returns the tokens reused.

        Needs no free block. With `reuse` off the owner finds nothing, but what it computes can be found by others.
        """
        assert owner not in self.tables, f"owner {owner} is admitted already"
        if not self.reuse:
            self.tables[owner] = Table(len(self.groups), cursor=NONE, commit_at=NEVER)
            return 0
        path = self._reusable(tokens, salt, None) if reuse else []
        cursor = path[-1] if path else self.index.root(self._space(salt))
        self.index.pin(cursor)
        size = self.tokens_per_block
        num_reused = len(path)
        table = Table(len(self.groups), cursor=cursor, commit_at=(num_reused + 1) * size)
        table.num_reused = table.num_indexed = num_reused
        table.capacity = num_reused * size
        if path:
            for pool, blocks, mine in zip(self.pools, self.index.blocks, table.blocks):
                mine += [blocks[node] for node in path]
                pool.lease_all(mine)
        self.tables[owner] = table
        if reuse:
            self._count_lookup(len(tokens), num_reused)
        return num_reused * size

    def num_tokens_capacity(self, owner: int) -> int:
        """Tokens that fit into the owner's blocks: up to there `extend` has nothing to do."""
        return self.tables[owner].capacity

    def missing_blocks(self, owner: int, num_tokens: int) -> int:
        """Blocks of each group still to be allocated until `num_tokens` tokens fit."""
        return max(0, self.blocks_needed(num_tokens) - self.tables[owner].num_blocks)

    def extend(self, owner: int, num_tokens: int) -> bool:
        """Grows every table of the owner to hold `num_tokens`, evicting cached blocks as needed.

        All or nothing: False when some group can't, and then nothing has changed.
        """
        table = self.tables[owner]
        if num_tokens <= table.capacity:
            return True
        count = -(-num_tokens // self.tokens_per_block) - len(table.blocks[0])
        if self.num_available() < count:
            return False
        for group, mine in enumerate(table.blocks):
            mine += self._allocate(group, count)
        table.capacity += count * self.tokens_per_block
        return True

    def take_new_blocks(self, owner: int) -> Blocks:
        """Per group (index in the table, block) of all blocks since the last call, reused and shared ones included."""
        table = self.tables[owner]
        first = table.num_announced
        table.num_announced = len(table.blocks[0])
        return tuple([[*enumerate(mine[first:], first)] for mine in table.blocks])

    def table(self, owner: int, group: int = 0) -> list[int]:
        return list(self.tables[owner].blocks[group])

    def commit(self, owner: int, tokens: Tokens, num_computed: int) -> None:
        """Indexes the blocks that have become full.

        `tokens` is the owner's whole sequence, read only where blocks are new; the KV of the first `num_computed` is
        in the cache and won't be written again. A call within a block costs nothing.
        """
        table = self.tables[owner]
        if num_computed < table.commit_at:
            return
        first, last = table.num_indexed, num_computed // self.tokens_per_block
        assert num_computed <= len(tokens) and num_computed <= table.capacity, (num_computed, table.capacity)
        index, node = self.index, table.cursor
        path: list[int] = []
        for at in range(first, last):
            node = index.descend(node, index.edge(tokens, at))
            path.append(node)
        for group, mine in enumerate(table.blocks):
            self._index_blocks(group, path, mine[first:last])
        index.pin(node)
        index.unpin(table.cursor)
        table.cursor = node
        table.num_indexed = last
        table.commit_at = (last + 1) * self.tokens_per_block

    def release(self, owner: int, *, index: bool = True) -> None:
        """Ends the owner's tables and gives its leases back; indexed blocks stay cached, the others are free.

        With `index` off nothing that this owner computed, and nothing computed on top of it, is found again.
        """
        table = self.tables[owner]
        if not index and table.num_indexed > table.num_reused:
            self._forget(self.index.ancestor(table.cursor, table.num_indexed - table.num_reused - 1))
        del self.tables[owner]
        depth = table.num_indexed
        for pool, mine in zip(self.pools, table.blocks):
            pool.unlease_all(mine[: depth - 1 if depth else None : -1])
        # From the last block to the first, so that a prefix is never evicted before what follows it.
        parent = self.index.parent
        for group, (pool, mine) in enumerate(zip(self.pools, table.blocks)):
            names, node = pool.node, table.cursor
            for at in range(depth - 1, -1, -1):
                block = mine[at]
                if names[block] != node:
                    self._use_duplicate(group, node, block)
                pool.unlease(block)
                node = parent[node]
        if table.cursor != NONE:
            self.index.unpin(table.cursor)

    def fork(self, parent: int, child: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """Starts `child` with the parent's first `num_tokens` tokens, all of them computed.

        Full blocks are shared. A partial last block is a new one per group; returns the copies that fill it,
        (group, source block, destination block). Until its copy has run, the source needs a lease unless the
        parent outlives it. Raises NoBlocks.
        """
        assert child not in self.tables, f"owner {child} is admitted already"
        origin = self.tables[parent]
        assert num_tokens <= origin.capacity, (num_tokens, origin.capacity)
        num_full, rest = divmod(num_tokens, self.tokens_per_block)
        if rest and not self.num_available():
            raise NoBlocks(f"no block for the copy of a partial block of owner {parent}")
        table = Table(len(self.groups), cursor=NONE, commit_at=NEVER)
        table.num_reused = min(origin.num_reused, num_full)
        table.capacity = (num_full + (rest > 0)) * self.tokens_per_block
        if origin.cursor != NONE:
            table.num_indexed = min(origin.num_indexed, num_full)
            table.cursor = self.index.ancestor(origin.cursor, origin.num_indexed - table.num_indexed)
            if origin.commit_at != NEVER:
                table.commit_at = (table.num_indexed + 1) * self.tokens_per_block
            self.index.pin(table.cursor)
        copies: list[tuple[int, int, int]] = []
        for group, (theirs, mine) in enumerate(zip(origin.blocks, table.blocks)):
            mine += theirs[:num_full]
            self.pools[group].lease_all(mine)
            if rest:
                mine += self._allocate(group, 1)
                copies.append((group, theirs[num_full], mine[num_full]))
        self.tables[child] = table
        return copies

    def lease(self, group: int, block: int) -> None:
        """One more lease on a leased or cached block, for a copy or a transfer in flight."""
        self.pools[group].lease(block)
        self.extra_leases[group, block] = self.extra_leases.get((group, block), 0) + 1

    def unlease(self, group: int, block: int) -> None:
        """Gives a lease of `lease` back."""
        count = self.extra_leases.get((group, block), 0)
        assert count > 0, f"block {block} of group {group} has no extra lease"
        if count > 1:
            self.extra_leases[group, block] = count - 1
        else:
            del self.extra_leases[group, block]
        pool = self.pools[group]
        pool.unlease(block)
        if not pool.leases[block]:
            self._touch_prefix(group, pool.node[block])

    def reset(self) -> None:
        """Forgets everything computed so far: cached blocks are free, no block is found again.

        Owners that run keep their blocks, and nothing of theirs is indexed any more.
        """
        for root in list(self.index.spaces):
            self._forget(root)

    def check(self) -> None:
        """Recounts everything, in time linear in the pools; raises AssertionError with what disagrees."""
        check_cache(self.pools, self.index, self.tables, self.extra_leases)

    def _space(self, salt: str) -> Namespace:
        return self._base._replace(salt=salt) if salt else self._base

    def _reusable(self, tokens: Tokens, salt: str, limit: int | None) -> list[int]:
        """The nodes of the longest prefix that has its block in every group."""
        max_tokens = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        if not self.reuse or max_tokens < self.tokens_per_block:
            return []
        path = self.index.walk(self._space(salt), tokens, max_tokens // self.tokens_per_block)
        for blocks in self.index.blocks:
            for at, node in enumerate(path):
                if blocks[node] == NONE:
                    del path[at:]
                    break
        return path

    def _allocate(self, group: int, count: int) -> list[int]:
        """`count` blocks with one lease each; the caller knows that they are available."""
        pool = self.pools[group]
        num_evictions = count - len(pool.free)
        if num_evictions > 0:
            self.index.clear_blocks(group, pool.evict(num_evictions))
            self.counters.evictions += num_evictions
        self.counters.allocated_blocks += count
        return pool.take(count)

    def _index_blocks(self, group: int, nodes: list[int], blocks: list[int]) -> None:
        """Names an owner's full blocks at the nodes of their tokens."""
        named, uses, names = self.index.blocks[group], self.index.uses, self.pools[group].node
        for node, block in zip(nodes, blocks):
            if named[node] == NONE:
                assert names[block] == NONE, f"block {block} is indexed at node {names[block]} already"
                named[node] = block
                names[block] = node
                uses[node] += 1
            else:
                self._index_again(group, node, block)

    def _index_again(self, group: int, node: int, block: int) -> None:
        """An owner's full block meets the block of the same tokens: it takes that one's place unless that is leased."""
        pool = self.pools[group]
        known = self.index.blocks[group][node]
        if known != block and not pool.leases[known]:  # the same block: shared by a fork
            pool.priority[block] = pool.priority[known]
            pool.clear_node(known)
            self.index.blocks[group][node] = block
            pool.set_node(block, node)

    def _use_duplicate(self, group: int, node: int, block: int) -> None:
        """An unnamed block with the tokens of `node` is about to be given back: its node counts as just used."""
        pool = self.pools[group]
        known = self.index.blocks[group][node]
        if known == NONE:  # evicted since: ours takes its place
            self.index.set_block(group, node, block)
            pool.set_node(block, node)
        elif not pool.leases[known]:
            pool.touch(known)

    def _forget(self, top: int) -> None:
        """Takes a node and all below it out of the index. Owners whose tables pass there index nothing more."""
        nodes = self.index.subtree(top)
        doomed = set(nodes)
        for table in self.tables.values():
            if table.cursor in doomed:
                self._cut(table, top)
        for node in reversed(nodes):
            for group, pool in enumerate(self.pools):
                block = self.index.blocks[group][node]
                if block != NONE:
                    pool.clear_node(block)
                    self.index.clear_block(group, node)

    def _cut(self, table: Table, top: int) -> None:
        """The table's indexed blocks end above `top` for good."""
        index, cursor = self.index, table.cursor
        above = index.parent[top]
        node = cursor
        while node != above and table.num_indexed:
            node = index.parent[node]
            table.num_indexed -= 1
        table.cursor = above
        table.commit_at = NEVER
        if above != NONE:
            index.pin(above)
        index.unpin(cursor)

    def _touch_prefix(self, group: int, node: int) -> None:
        """Keeps the prefix of a block that was just used more recent than the block."""
        pool, blocks = self.pools[group], self.index.blocks[group]
        while node != NONE:
            block = blocks[node]
            if block != NONE and not pool.leases[block]:
                pool.touch(block)
            node = self.index.parent[node]

    def _count_lookup(self, num_tokens: int, num_reused: int) -> None:
        counters, num_groups = self.counters, len(self.groups)
        hit_tokens = num_reused * self.tokens_per_block
        counters.lookups += 1
        counters.hit_tokens += hit_tokens
        counters.miss_tokens += num_tokens - hit_tokens
        counters.reused_blocks += num_reused * num_groups
        counters.missed_blocks += (self.blocks_needed(num_tokens) - num_reused) * num_groups
