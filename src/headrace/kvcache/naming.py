"""Giving an owner's computed blocks their names in the index, and keeping the order of use right."""

from __future__ import annotations

from headrace.kvcache.radix import NONE, Tokens, media_key
from headrace.kvcache.store import Store
from headrace.kvcache.table import NEVER, Table


class Naming:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = store.index
        self._size = store.settings.tokens_per_block
        self._attention = [group for group, spec in enumerate(store.groups) if not spec.is_recurrent]
        self._suffixes = store.settings.partial_reuse and len(self._attention) == store.num_groups

    def index(self, table: Table, tokens: Tokens, last: int) -> list[int]:
        """Names the table's full blocks up to `last`; returns their nodes."""
        index, claim, first = self._index, table.claim, table.num_indexed
        path = index.descend_all(table.cursor, index.edges(tokens, first, last, claim.media))
        node = path[-1]
        index.move_pin(table.cursor, node)  # before all else: of recurrent groups alone it names nothing yet
        for group in self._attention:
            blocks = table.parts[group].blocks[first:last]
            self._index_blocks(group, path, blocks)
            self._store.news.named(group, path, claim=claim, first=first)
            if claim.retention is not None:
                self._store.keeping.retain_all(group, path, claim, first)
        table.cursor = node
        table.num_indexed = last
        table.index_at = (last + 1) * self._size
        return path

    def _index_blocks(self, group: int, nodes: list[int], blocks: list[int]) -> None:
        index = self._index
        named, uses, names = index.blocks[group], index.uses, self._store.pools[group].node
        index.version += 1
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
        pool = self._store.pools[group]
        known = self._index.blocks[group][node]
        if known != block and not pool.leases[known]:  # the same block: shared by a fork
            self._index.blocks[group][node] = block
            pool.set_node(block, node)
            pool.priority[block] = pool.priority[known]  # nothing new for who listens to events
            self._store.keeping.inherit(group, node, group, known)
            pool.clear_node(known)

    def use(self, group: int, node: int, block: int, table: Table, at: int) -> None:
        """An unnamed block with the tokens of `node` is about to be given back: its node counts as just used."""
        pool = self._store.pools[group]
        known = self._index.blocks[group][node]
        if known == NONE:  # evicted since: ours takes its place
            self._store.name(group, node, block, claim=table.claim, at=at)
            self._store.keeping.retain_all(group, (node,), table.claim, at)
        elif not pool.leases[known]:
            pool.touch(known)

    def suffix(self, table: Table, tokens: Tokens, num_computed: int) -> None:
        """Names the partly filled block behind the indexed ones, whose owner writes nothing more."""
        rest = num_computed - table.num_indexed * self._size
        if not self._suffixes or table.index_at == NEVER or not 0 < rest < self._size:
            return
        start = table.num_indexed * self._size
        if table.claim.media and media_key(table.claim.media, start, num_computed):
            return
        key = self._index.pack(tokens, start, num_computed)
        blocks = self._index.blocks
        for child, count in self._index.nearest(table.cursor, key, b""):
            if count == rest and all(blocks[group][child] != NONE for group in self._attention):
                return
        at = table.num_indexed
        node = self._index.descend(table.cursor, key)
        for group in self._attention:
            if blocks[group][node] == NONE:
                self._store.name(group, node, table.parts[group].blocks[at], claim=table.claim, at=at)
                self._store.keeping.retain_all(group, (node,), table.claim, at)
