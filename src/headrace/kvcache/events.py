"""What happened to which block, for a reader outside: created, stored, removed, updated, in TensorRT-LLM's JSON form.

A block's hash is a chain, so that two blocks have the same one exactly when they hold the KV of the same tokens after
the same prefix in the same namespace:

    root  = sha256("headrace-kv-1", every field of the namespace with its type and length)
    block = sha256(hash of the parent or of the root, length of the key, key)

where the key is the block's token ids as little-endian int32, and for a block with media in it what the index adds to
that. `v2_sha256` shows all 32 bytes as hex, `v2_sha256_64` the first 8 as a big-endian integer.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from headrace.kvcache.radix import NONE, Namespace, RadixIndex
from headrace.seam import GroupSpec
from headrace.types import MediaSpan

ALGORITHMS = ("auto", "v2_sha256", "v2_sha256_64")
MAX_BLOCKS_PER_EVENT = 128
"""A chain that is stored, or blocks that are removed, one right after the other are one event up to here."""

Diff = tuple[int, int] | None
"""(old value, new value)."""


class NoEvents:
    """Nobody wants to know."""

    def created(self, levels: Sequence[Sequence[int]]) -> None: ...

    def stored(
        self,
        group: int,
        node: int,
        parent: int,
        tokens: Sequence[int],
        level: int,
        priority: int,
        space: Namespace,
        media: Sequence[MediaSpan] = (),
    ) -> None: ...

    def removed(self, group: int, node: int) -> None: ...

    def updated(self, group: int, node: int, *, level: Diff = None, priority: Diff = None) -> None: ...

    def take(self) -> list[dict[str, Any]]:
        return []


class EventLog(NoEvents):
    """The last `max_size` events; older ones are dropped, which the reader sees by a gap in `event_id`.

    Hashes are kept for nodes that name a block of some group, and for their ancestors. The caller reports `removed`
    before a node's id can be another's.
    """

    def __init__(
        self,
        max_size: int,
        groups: Sequence[GroupSpec],
        *,
        index: RadixIndex,
        algorithm: str = "auto",
        max_seq_len: int = 0,
    ) -> None:
        """
        Args:
            index: whose nodes these are; keys and ancestors are read there.
            max_seq_len: the `window_size` of groups without a window.

        Raises:
            ValueError: an unknown or unavailable algorithm.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"kv_cache_event_hash_algo: {algorithm} is not computed here: use v2_sha256 or v2_sha256_64"
            )
        self.num_dropped = 0
        self._max_size = max_size
        self._windows = [group.window or max_seq_len for group in groups]
        self._index = index
        self._algorithm = "v2_sha256" if algorithm == "auto" else algorithm
        self._buffer: deque[dict[str, Any]] = deque()
        self._next_id = 0
        self._hash: dict[int, bytes] = {}
        self._above: dict[int, int] = {}
        """The hashed parent of each hashed node, or NONE."""
        self._uses: dict[int, int] = {}
        """Stored blocks of the node + hashed children."""
        self._tail: tuple[str, int, int] | None = None
        """(type, group, last node) of the newest event in the buffer, while it may still grow."""
        self._fresh: dict[tuple[int, int], dict[str, Any]] = {}
        """By (group, node): blocks of the newest event, if that is of stored ones."""

    def created(self, levels: Sequence[Sequence[int]]) -> None:
        """`levels` is by group, then by tier: the number of blocks."""
        for group, counts in enumerate(levels):
            self._append(group, {"type": "created", "num_blocks_per_cache_level": list(counts)})

    def stored(
        self,
        group: int,
        node: int,
        parent: int,
        tokens: Sequence[int],
        level: int,
        priority: int,
        space: Namespace,
        media: Sequence[MediaSpan] = (),
    ) -> None:
        """`parent` is a node, a namespace's root, or NONE; `media` are those of the block, by position in the block."""
        if node not in self._hash:
            self._add(node, self._known(parent, space))
        self._uses[node] += 1
        block = {
            "type": "stored_block",
            "block_hash": self._shown(self._hash[node]),
            "tokens": [{"type": "unique_token", "token_id": int(token), "token_extra_id": 0} for token in tokens],
            "cache_level": level,
            "priority": priority,
            "mm_keys": [_media_key(span) for span in media],
            "cache_salt": space.salt or None,
            "lora_id": space.adapter or None,
        }
        above = self._above[node]
        if self._tail == ("stored", group, above) and above != NONE and len(self._fresh) < MAX_BLOCKS_PER_EVENT:
            self._buffer[-1]["data"]["blocks"].append(block)
        else:
            parent_hash = None if above == NONE else self._shown(self._hash[above])
            self._append(group, {"type": "stored", "parent_hash": parent_hash, "blocks": [block]})
        self._tail = "stored", group, node
        self._fresh[group, node] = block

    def removed(self, group: int, node: int) -> None:
        """The node names no block of this group any more, on any tier. Nothing for a node that was never stored."""
        if node not in self._hash:
            return
        shown = self._shown(self._hash[node])
        self._release(node)
        if self._tail is not None and self._tail[:2] == ("removed", group):
            hashes: list[Any] = self._buffer[-1]["data"]["block_hashes"]
            hashes.append(shown)
            if len(hashes) >= MAX_BLOCKS_PER_EVENT:
                self._tail = None
            return
        self._append(group, {"type": "removed", "block_hashes": [shown]})
        self._tail = "removed", group, NONE

    def updated(self, group: int, node: int, *, level: Diff = None, priority: Diff = None) -> None:
        """Of a block in the newest event, that event is made to say it."""
        block = self._fresh.get((group, node))
        if block is not None:
            block["cache_level"] = level[1] if level else block["cache_level"]
            block["priority"] = priority[1] if priority else block["priority"]
        elif node in self._hash and (level is not None or priority is not None):
            data = {
                "type": "updated",
                "block_hash": self._shown(self._hash[node]),
                "cache_level": _diff(level),
                "priority": _diff(priority),
            }
            self._append(group, data)

    def take(self) -> list[dict[str, Any]]:
        events = list(self._buffer)
        self._buffer.clear()
        self._tail = None
        self._fresh = {}
        return events

    def _append(self, group: int, data: dict[str, Any]) -> None:
        self._tail = None
        self._fresh = {}
        if len(self._buffer) >= self._max_size:
            self._buffer.popleft()
            self.num_dropped += 1
        event = {
            "event_id": self._next_id,
            "data": data,
            "window_size": self._windows[group],
            "hash_algo": self._algorithm,
        }
        self._buffer.append(event)
        self._next_id += 1

    def _shown(self, digest: bytes) -> str | int:
        return digest.hex() if self._algorithm == "v2_sha256" else int.from_bytes(digest[:8], "big")

    # ---- hashes ------------------------------------------------------------------------------

    def _known(self, node: int, space: Namespace) -> tuple[int, bytes]:
        """The node and its hash, made now for a hole that was never stored; of a root NONE and the namespace's."""
        unknown: list[int] = []
        while node not in self._hash and node != NONE and node not in self._index.spaces:
            unknown.append(node)
            node = self._index.parent[node]
        above = (node, self._hash[node]) if node in self._hash else (NONE, root_hash(space))
        for node in reversed(unknown):
            self._add(node, above)
            above = node, self._hash[node]
        return above

    def _add(self, node: int, above: tuple[int, bytes]) -> None:
        parent, parent_hash = above
        self._hash[node] = chain_hash(parent_hash, self._index.key[node])
        self._above[node] = parent
        self._uses[node] = 0
        if parent != NONE:
            self._uses[parent] += 1

    def _release(self, node: int) -> None:
        while node != NONE:
            self._uses[node] -= 1
            if self._uses[node]:
                return
            del self._uses[node], self._hash[node]
            node = self._above.pop(node)


def root_hash(space: Namespace) -> bytes:
    """Of a namespace: every field with its type and length, so that none can run over into its neighbour."""
    digest = hashlib.sha256(b"headrace-kv-1")
    for value in space:
        text = repr(value).encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(text)) + text)
    return digest.digest()


def chain_hash(parent: bytes, key: bytes) -> bytes:
    return hashlib.sha256(parent + struct.pack("<Q", len(key)) + key).digest()


def _diff(values: Diff) -> dict[str, Any] | None:
    return None if values is None else {"type": "event_diff", "new_value": values[1], "old_value": values[0]}


def _media_key(span: MediaSpan) -> dict[str, Any]:
    return {"type": "mm_key", "hash": span.digest.hex(), "start_offset": span.start}
