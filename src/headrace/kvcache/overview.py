"""What the blocks are in use for and the top of the prefix tree, small enough to be looked at.

Only whoever asks pays: time is linear in the blocks of pools that are told in cells, of which there are at most
MAX_SCANNED, and bounded in the size of the tree.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np

from headrace import wire
from headrace.kvcache.manager import KvCache
from headrace.kvcache.pool import BlockPool
from headrace.kvcache.radix import NONE, Namespace
from headrace.kvcache.store import Store

__all__ = ["PrefixTree", "pool_maps"]

TIERS = ("device", "host", "disk")
MAX_SCANNED = 1 << 17
"""Blocks, in less than 10 ms."""
MAX_VISITED = 4096
"""Nodes that are read for one tree."""
MAX_LOOKED_AT = 256
"""Children of a node, or namespaces, among which those that are shown are chosen."""
MAX_CHILDREN = 12
MAX_SPACES = 16

_SECRET = os.urandom(16)


def pool_maps(cache: KvCache, *, section: int, max_cells: int, max_scanned: int = MAX_SCANNED) -> list[wire.PoolMap]:
    """All pools, the device's first; `max_cells` and `max_scanned` are of all together."""
    store, pinned = cache.store, cache.pins.num_pinned
    share = max(1, max_cells // max(len(store.pools), 1))
    maps: list[wire.PoolMap] = []
    for number, pool in enumerate(store.pools):
        tier, group = divmod(number, store.num_groups)
        spec = store.groups[group]
        per_cell = -(-pool.num_total // share) or 1
        used, cached = _cells(pool, per_cell) if pool.num_total <= max_scanned else ([], [])
        max_scanned -= pool.num_total if used else 0
        maps.append(
            wire.PoolMap(
                section=section,
                tier=TIERS[tier],
                group=group,
                kind="recurrent" if spec.is_recurrent else spec.attention,
                num_layers=len(spec.layers),
                dtype=spec.dtype,
                window=spec.window,
                block_bytes=store.block_bytes[group],
                num_total=pool.num_total,
                num_used=pool.num_leased,
                num_cached=pool.num_cached,
                num_pinned=pinned[number],
                blocks_per_cell=per_cell,
                used=used,
                cached=cached,
            )
        )
    return maps


def _cells(pool: BlockPool, per_cell: int) -> tuple[list[int], list[int]]:
    """How many blocks of each cell are used, and cached."""
    if not pool.num_total:
        return [], []
    starts = range(1, pool.num_blocks, per_cell)
    held_by_nobody = [pool.leases[start : start + per_cell].count(0) for start in starts]  # faster than any array
    free: list[int] = np.bincount((np.asarray(pool.free, np.int64) - 1) // per_cell, minlength=len(starts)).tolist()
    sizes = [min(per_cell, pool.num_blocks - start) for start in starts]
    used = [size - count for size, count in zip(sizes, held_by_nobody)]
    return used, [count - number for count, number in zip(held_by_nobody, free)]


class _Seen(NamedTuple):
    """A node that will be shown: where its run begins, and below what."""

    node: int
    parent: int
    start: int
    digest: bytes
    root: wire.Prefix


@dataclass(slots=True)
class PrefixTree:
    """Collects the top of the trees of one or more caches, level by level.

    Args:
        salt: of whoever asks; `with_others`: prefixes of other salts are told of as well.
        max_tokens: ids that are told of each prefix of that salt which anybody with it may find.
    """

    max_prefixes: int
    salt: str = ""
    with_others: bool = True
    max_tokens: int = 0
    prefixes: list[wire.Prefix] = field(default_factory=list[wire.Prefix])
    num_hidden: int = 0
    _num_visited: int = 0

    def add(self, cache: KvCache, *, section: int) -> None:
        store = cache.store
        waiting = deque(self._spaces(store, section))
        while waiting and len(self.prefixes) < self.max_prefixes and self._num_visited < MAX_VISITED:
            seen = waiting.popleft()
            prefix, node, digest = self._run(store, seen)
            place = len(self.prefixes)
            self.prefixes.append(prefix)
            end = prefix.start + prefix.num_tokens
            for child in _chosen(store, node):
                waiting.append(_Seen(child, place, end, digest, seen.root))

    def _spaces(self, store: Store, section: int) -> Iterator[_Seen]:
        """Those that will be shown, their entries made; the largest first."""
        roots = [(space, node) for space, node in store.index.roots.items() if self._may_show(space)]
        self.num_hidden += len(store.index.roots) - len(roots)
        roots.sort(key=lambda pair: (pair[0].salt != self.salt, -store.index.uses[pair[1]]))
        self.num_hidden += max(len(roots) - MAX_SPACES, 0)
        for space, node in roots[:MAX_SPACES]:
            digest = _digest(repr(space).encode())
            root = wire.Prefix(
                parent=-1,
                name=digest.hex()[:8],
                section=section,
                is_own=space.salt == self.salt,
                is_private=bool(space.scope),
                is_salted=bool(space.salt),
                adapter=space.adapter,
                num_below=_num_children(store, node),
            )
            place = len(self.prefixes)
            self.prefixes.append(root)
            for child in _chosen(store, node):
                yield _Seen(child, place, 0, digest, root)

    def _may_show(self, space: Namespace) -> bool:
        return self.with_others or (space.salt == self.salt and not space.scope)

    def _run(self, store: Store, seen: _Seen) -> tuple[wire.Prefix, int, bytes]:
        """The entry of the run that begins at a node, the run's last node, and the digest of all up to its end."""
        index, size = store.index, store.settings.tokens_per_block
        node, digest = seen.node, seen.digest
        num_blocks = num_tokens = num_holders = 0
        on_tier = [0] * store.num_tiers
        told: list[int] = []
        may_tell = seen.root.is_own and not seen.root.is_private
        while True:
            self._num_visited += 1
            key = index.key[node]
            digest = _digest(digest + key)
            num_blocks += 1
            num_tokens += min(len(key) // 4, size)
            num_holders = max(num_holders, _num_holders(store, node))
            for tier in range(store.num_tiers):
                on_tier[tier] += _is_on(store, tier, node)
            if may_tell and len(told) < self.max_tokens:
                told += index.tokens_of(node)[: self.max_tokens - len(told)]
            below = index.children(node) if _num_children(store, node) == 1 else []
            if not below or self._num_visited >= MAX_VISITED:
                break
            node = below[0]
        prefix = wire.Prefix(
            parent=seen.parent,
            name=digest.hex()[:8],
            section=seen.root.section,
            is_own=seen.root.is_own,
            is_private=seen.root.is_private,
            is_salted=seen.root.is_salted,
            adapter=seen.root.adapter,
            start=seen.start,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            on_tier=on_tier,
            num_holders=num_holders,
            num_below=_num_children(store, node),
            tokens=told,
        )
        return prefix, node, digest


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16, key=_SECRET).digest()


def _num_children(store: Store, node: int) -> int:
    fork = store.index.forks.get(node)
    return int(store.index.child[node] != NONE) if fork is None else len(fork)


def _chosen(store: Store, node: int) -> list[int]:
    """The children that are shown: those that most hold, and then those that most lies below."""
    fork = store.index.forks.get(node)
    if fork is None:
        return store.index.children(node)
    children = list(islice(fork.values(), MAX_LOOKED_AT))
    children.sort(key=lambda child: (-_num_holders(store, child), -store.index.uses[child]))
    return children[:MAX_CHILDREN]


def _num_holders(store: Store, node: int) -> int:
    """Leases of the node's block on the device, in the group where it has most."""
    blocks = ((pool, store.block_of(pool, node)) for pool in range(store.num_groups))
    return max((store.pools[pool].leases[block] for pool, block in blocks if block != NONE), default=0)


def _is_on(store: Store, tier: int, node: int) -> bool:
    first = tier * store.num_groups
    return any(store.block_of(pool, node) != NONE for pool in range(first, first + store.num_groups))
