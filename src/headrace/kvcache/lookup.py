"""Finding what a prompt may reuse, and saying why it isn't more."""

from __future__ import annotations

from itertools import islice

from headrace.kvcache.claim import Claim
from headrace.kvcache.radix import NONE, Tokens, media_key
from headrace.kvcache.reuse import (
    EVICTED,
    GRANULARITY,
    NO_PREFIX,
    NOTHING,
    SALT,
    Found,
    Names,
    first_needed,
    is_copy_cheaper,
    is_there,
    longest,
    num_sinks,
)
from headrace.kvcache.store import Store
from headrace.seam import DISK, GroupSpec

MAX_SPACES = 64
"""Other namespaces that are searched for a first block, to call a miss one of salt."""


class Lookup:
    """Remembers the last answer, since a prompt is asked for several times while nothing changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = store.index
        self._settings = store.settings
        self._size = store.settings.tokens_per_block
        near = min(store.num_tiers, DISK)
        self._device = self._names(1)
        self._near = self._names(near)
        self._far = self._names(store.num_tiers)
        self._attention = [group for group, spec in enumerate(store.groups) if not spec.is_recurrent]
        self._partial = store.settings.partial_reuse and len(self._attention) == store.num_groups
        self._last: tuple[Tokens, int, Claim, int | None, int] | None = None
        self._found = NOTHING
        self.prefill_tokens_per_s = 0.0
        """As measured; 0.0 is unknown."""

    def _names(self, num_tiers: int) -> list[tuple[GroupSpec, Names]]:
        store = self._store
        lists = self._index.blocks
        return [
            (spec, tuple([lists[tier * store.num_groups + group] for tier in range(num_tiers)]))
            for group, spec in enumerate(store.groups)
        ]

    def find(self, tokens: Tokens, claim: Claim, limit: int | None = None) -> Found:
        """The longest prefix on device and host; at most `limit` tokens, never the last one. Changes nothing."""
        asked = (tokens, len(tokens), claim, limit, self._index.version)
        last = self._last
        keep = self._settings.copy_on_partial_reuse  # taking over depends on leases
        if last is None or last[0] is not tokens or last[1:] != asked[1:] or not keep:
            self._found = self._find(tokens, claim, limit)
            self._last = asked
        return self._found

    def _find(self, tokens: Tokens, claim: Claim, limit: int | None) -> Found:
        size, index = self._size, self._index
        max_tokens = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        if max_tokens < 1:
            return NOTHING
        path, missed = index.walk(claim.space, tokens, max_tokens // size, claim.media)
        length = longest(path, self._near, size) if path else 0
        if length and len(self._near[0][1]) > 1:
            length = self._worth(path, length)
        source, num_partial = NONE, 0
        if self._partial:
            node = path[length - 1] if length else index.roots.get(claim.space, NONE)
            start = length * size
            if node != NONE and index.has_child_from(node, tokens[start]):
                part = index.pack(tokens, start, min(start + size, max_tokens))
                media = media_key(claim.media, start, start + size) if claim.media else b""
                source, num_partial = self._nearest(node, part, media)
        return Found(path, length, source, num_partial, length * size + num_partial, missed)

    def _worth(self, path: list[int], length: int) -> int:
        """As many blocks, or only those on the device when computing the others takes less time than copying them."""
        here = longest(path[:length], self._device, self._size)
        if here == length or not self.prefill_tokens_per_s:
            return length
        num_bytes = sum(
            self._store.block_bytes[group]
            for group in range(self._store.num_groups)
            for at in self.needed(group, length)
            if self._index.blocks[group][path[at]] == NONE
        )
        cheaper = is_copy_cheaper(
            num_bytes,
            (length - here) * self._size,
            copy_bytes_per_s=self._settings.copy_bytes_per_s,
            tokens_per_s=self.prefill_tokens_per_s,
        )
        return length if cheaper else here

    def _nearest(self, node: int, part: bytes, media: bytes) -> tuple[int, int]:
        for child, count in self._index.nearest(node, part, media):
            if self._settings.copy_on_partial_reuse:
                usable = all(is_there(self._near[group][1], child) for group in self._attention)
            else:
                usable = self._index.child[child] == NONE and all(
                    self._is_idle(group, child) for group in self._attention
                )
            if usable:
                return child, count
        return NONE, 0

    def _is_idle(self, group: int, node: int) -> bool:
        block = self._index.blocks[group][node]
        return block != NONE and not self._store.pools[group].leases[block]

    def needed(self, group: int, length: int) -> list[int]:
        """Which of the first `length` blocks a sequence that goes on behind them needs of a group."""
        spec = self._store.groups[group]
        if spec.is_recurrent:
            return [length - 1] if length else []
        first = first_needed(spec, length * self._size, self._size)
        sinks = min(num_sinks(spec, self._size), first)
        return [*range(sinks), *range(first, length)]

    def to_fetch(self, tokens: Tokens, claim: Claim) -> list[tuple[int, int]]:
        """(group, node) of what isn't on the device of the longest prefix on any tier, in order; [] when the longest
        one on device and host is as long."""
        found = self.find(tokens, claim)
        length = longest(found.path, self._far, self._size)
        if length <= found.length:
            return []
        blocks = self._index.blocks
        wanted = [
            (at, group, found.path[at])
            for group in range(self._store.num_groups)
            for at in self.needed(group, length)
            if blocks[group][found.path[at]] == NONE
        ]
        return [(group, node) for _, group, node in sorted(wanted)]

    def reason(self, found: Found, tokens: Tokens, claim: Claim) -> str:
        """Why no more than `found` is reused; one reason for all tokens that are missing."""
        index, size, path = self._index, self._size, found.path
        if len(tokens) - found.num_tokens <= 1:
            return GRANULARITY
        if len(path) > found.length:
            attention = [self._near[group] for group in self._attention]
            return GRANULARITY if longest(path, attention, size) > found.length else EVICTED
        at = len(path)
        if (at + 1) * size >= len(tokens):
            return NO_PREFIX if self._partial else GRANULARITY
        node = path[-1] if path else index.roots.get(claim.space, NONE)
        key = found.missed or index.edge(tokens, at, claim.media)
        if index.was_evicted(claim.space, node, key):
            return EVICTED
        for root in islice(index.spaces if not at else (), MAX_SPACES):
            if index.has_child(root, key):
                return SALT
        return NO_PREFIX
