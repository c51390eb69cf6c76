"""The radix index: which blocks hold the KV of which tokens, by namespace and prefix.

A node stands for one block of tokens after one exact prefix, and names at most one block per pool (one pool per
layer group and tier). A node is an index into flat lists. An edge is the bytes of the block's token ids and of its
media, so finding a child compares or hashes each block of a prompt once and its prefix never. A node of fewer tokens
than a block, a suffix, has no children and is never on a path: only `nearest` finds it.

A node lives while it is used: by a block it names, by a child, or by a pin. Of those that are gone, a bounded number
is remembered by name, to tell what was evicted from what was never there. A node without a block in some pool is a
hole there; its descendants can't be reached through that pool until somebody computes those tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from struct import Struct, pack
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.types import MediaSpan

Tokens: TypeAlias = "Sequence[int] | NDArray[np.signedinteger[Any]]"
"""Token ids; each fits into 32 bits."""

NONE = -1
MANY = -2
"""In `child`: the node has two or more children, which are in `forks`."""
DEAD = -1
"""In `uses`: the node id is spare."""

MAX_SIBLINGS = 32
"""Children that `nearest` looks at, the newest of those that begin with the same token."""
MAX_GHOSTS = 1 << 16
_MEDIA = Struct("<iiI")
"""Before each digest: first token in the block, that token's place in the item, length of the digest."""


class Namespace(NamedTuple):
    """All that changes K and V besides the tokens. Blocks of two namespaces are never shared.

    Compared as a tuple of typed values, so no value can run over into its neighbour.
    """

    salt: str = ""
    adapter: int = 0
    """Load id of the LoRA adapter; 0 is the base model."""
    scope: str = ""
    """The request or conversation that alone may find its blocks; "" is everybody."""
    revision: str = ""
    """Of the model's weights and of all else that `EngineFacts.fingerprint` names."""
    dtypes: tuple[str, ...] = ()
    """KV dtype of each layer group."""


def media_key(media: Sequence[MediaSpan], start: int, end: int) -> bytes:
    """Which items stand where among the tokens [start, end)."""
    parts: list[bytes] = []
    for span in media:
        if span.start < end and span.start + span.length > start:
            first = max(span.start, start)
            parts.append(_MEDIA.pack(first - start, first - span.start, len(span.digest)) + span.digest)
    return b"".join(parts)


class Ghosts:
    """Which nodes were there and are gone, as far as a bounded memory tells."""

    def __init__(self) -> None:
        self.serial: list[int] = []
        """By node: a number that no other node ever has; of a root its namespace's hash."""
        self._next_serial = 0
        self._newer: set[int] = set()
        """Hashes of (serial of the parent, edge)."""
        self._older: set[int] = set()

    def take_serials(self, count: int) -> int:
        """The first of as many numbers for nodes that begin."""
        first = self._next_serial
        self._next_serial += count
        return first

    def add(self, edges: Iterable[tuple[int, bytes]]) -> None:
        """Each (parent, key) led to a child that is gone."""
        serial = self.serial
        self._newer.update([hash((serial[parent], key)) for parent, key in edges])
        if len(self._newer) > MAX_GHOSTS:
            self._newer, self._older = set(), self._newer

    def has(self, serial: int, key: bytes) -> bool:
        ghost = hash((serial, key))
        return ghost in self._newer or ghost in self._older


class RadixIndex:
    def __init__(self, tokens_per_block: int, *, num_pools: int) -> None:
        self.tokens_per_block = tokens_per_block
        self._pack = Struct(f"<{tokens_per_block}i").pack
        self.parent: list[int] = []
        self.child: list[int] = []
        """The only child, or NONE, or MANY."""
        self.forks: dict[int, dict[bytes, int]] = {}
        self._heads: dict[int, dict[bytes, dict[int, None]]] = {}
        """By node with several children: by first token, those children, the oldest first."""
        self.key: list[bytes] = []
        """The edge from the parent; empty for a root."""
        self.uses: list[int] = []
        """Named blocks + children + pins."""
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_pools))
        """Per pool, by node: the block, or NONE."""
        self.roots: dict[Namespace, int] = {}
        self.spaces: dict[int, Namespace] = {}
        """The namespace of each root."""
        self.spare: list[int] = []
        self.version = 0
        """Grows with every name that is given or taken."""
        self._ghosts = Ghosts()

    @property
    def num_nodes(self) -> int:
        """Roots included."""
        return len(self.key) - len(self.spare)

    def pack(self, tokens: Tokens, start: int, end: int) -> bytes:
        """The bytes of tokens [start, end)."""
        part = tokens[start:end]
        if isinstance(part, np.ndarray):
            return part.astype("<i4").tobytes()
        return pack(f"<{len(part)}i", *part)

    def edge(self, tokens: Tokens, at: int, media: Sequence[MediaSpan] = ()) -> bytes:
        """The key of block `at` of a sequence."""
        start = at * self.tokens_per_block
        end = start + self.tokens_per_block
        part = tokens[start:end]
        key = part.astype("<i4").tobytes() if isinstance(part, np.ndarray) else self._pack(*part)
        return key + media_key(media, start, end) if media else key

    def edges(self, tokens: Tokens, first: int, last: int, media: Sequence[MediaSpan] = ()) -> list[bytes]:
        """The keys of blocks [first, last) of a sequence."""
        if last - first == 1:
            return [self.edge(tokens, first, media)]
        size = self.tokens_per_block
        packed = self.pack(tokens, first * size, last * size)
        keys = [packed[at : at + 4 * size] for at in range(0, len(packed), 4 * size)]
        if media:
            keys = [key + media_key(media, at * size, (at + 1) * size) for at, key in enumerate(keys, first)]
        return keys

    def tokens_of(self, node: int) -> list[int]:
        """The tokens of the node's own block."""
        return np.frombuffer(self.key[node][: 4 * self.tokens_per_block], "<i4").tolist()

    def walk(
        self, space: Namespace, tokens: Tokens, max_blocks: int, media: Sequence[MediaSpan] = ()
    ) -> tuple[list[int], bytes]:
        """The nodes of the longest known prefix of whole blocks, the first block's node first; holes included.

        Also the edge behind them, which isn't there; b"" where it had not to be looked for.
        """
        path: list[int] = []
        node = self.roots.get(space, NONE)
        if node == NONE:
            return path, b""
        child, known, forks = self.child, self.key, self.forks
        for at in range(max_blocks):
            below = child[node]
            if below == NONE:
                break
            key = self.edge(tokens, at, media)
            if below == MANY:
                node = forks[node].get(key, NONE)
                if node == NONE:
                    return path, key
            elif known[below] == key:
                node = below
            else:
                return path, key
            path.append(node)
        return path, b""

    def nearest(self, node: int, part: bytes, media: bytes) -> list[tuple[int, int]]:
        """Children of `node` that share their first tokens with `part` (the bytes of token ids), the most first.

        -> (child, tokens shared). `media` is the `media_key` of the whole block that `part` is the front of.
        Looks at MAX_SIBLINGS children at most.
        """
        below, head = self.child[node], part[:4]
        if below == MANY:
            same = self._heads[node].get(head)
            if same is None:
                return []
            children = list(islice(reversed(same), MAX_SIBLINGS))
        elif below != NONE and head and self.key[below].startswith(head):
            children = [below]
        else:
            return []
        counts = [(child, self._num_shared(self.key[child], part, media)) for child in children]
        return sorted([pair for pair in counts if pair[1]], key=lambda pair: -pair[1])

    def has_child_from(self, node: int, token: int) -> bool:
        """Whether `nearest` finds any child of `node` for a part that begins with this token."""
        below = self.child[node]
        if below == NONE:
            return False
        head = int(token).to_bytes(4, "little", signed=True)
        return head in self._heads[node] if below == MANY else self.key[below].startswith(head)

    def _num_shared(self, key: bytes, part: bytes, media: bytes) -> int:
        size = min(len(key), len(part), 4 * self.tokens_per_block)
        differ = int.from_bytes(key[:size], "little") ^ int.from_bytes(part[:size], "little")
        count = ((differ & -differ).bit_length() - 1) // 32 if differ else size // 4
        others = key[4 * self.tokens_per_block :]
        if others != media:  # as far as there is no item in either
            for mine in filter(None, (others, media)):
                count = min(count, _MEDIA.unpack_from(mine)[0])
        return count

    def has_child(self, node: int, key: bytes) -> bool:
        below = self.child[node]
        return key in self.forks[node] if below == MANY else below != NONE and self.key[below] == key

    def was_evicted(self, space: Namespace, node: int, key: bytes) -> bool:
        """Whether `node` (NONE: the root) had a child along `key` that is gone, as far as that is remembered."""
        return self._ghosts.has(hash(space) if node == NONE else self._ghosts.serial[node], key)

    def root(self, space: Namespace) -> int:
        """The namespace's root, made when it isn't there. Pin it or give it a child before anything else."""
        node = self.roots.get(space, NONE)
        if node == NONE:
            node = self._new_node(NONE, b"")
            self._ghosts.serial[node] = hash(space)
            self.roots[space] = node
            self.spaces[node] = space
        return node

    def descend(self, node: int, key: bytes) -> int:
        """The child of `node` along `key`, made when it isn't there. Give it a block or a pin before anything else."""
        below = self.child[node]
        if below == NONE:
            new = self.child[node] = self._new_node(node, key)
        elif below == MANY:
            fork = self.forks[node]
            found = fork.get(key, NONE)
            if found != NONE:
                return found
            new = fork[key] = self._new_node(node, key)
            self._heads[node].setdefault(key[:4], {})[new] = None
        else:
            other = self.key[below]
            if other == key:
                return below
            new = self._new_node(node, key)
            self.forks[node] = {other: below, key: new}
            heads = self._heads[node] = {other[:4]: {below: None}}
            heads.setdefault(key[:4], {})[new] = None
            self.child[node] = MANY
        self.uses[node] += 1
        return new

    def descend_all(self, node: int, keys: Sequence[bytes]) -> list[int]:
        """`descend` along all keys. Give the last node a block or a pin before anything else."""
        path: list[int] = []
        child = self.child
        for key in keys:
            if child[node] == NONE:
                break
            node = self.descend(node, key)
            path.append(node)
        if len(path) < len(keys):
            self._add_chain(node, keys[len(path) :] if path else keys, path)
        return path

    def children(self, node: int) -> list[int]:
        below = self.child[node]
        if below == MANY:
            return list(self.forks[node].values())
        return [] if below == NONE else [below]

    def subtree(self, node: int) -> list[int]:
        """The node and all below it, each after its parent."""
        nodes = [node]
        for above in nodes:
            nodes += self.children(above)
        return nodes

    def ancestor(self, node: int, distance: int) -> int:
        for _ in range(distance):
            node = self.parent[node]
        return node

    def set_block(self, pool: int, node: int, block: int) -> None:
        assert self.blocks[pool][node] == NONE, f"node {node} names block {self.blocks[pool][node]} already"
        self.blocks[pool][node] = block
        self.uses[node] += 1
        self.version += 1

    def clear_block(self, pool: int, node: int) -> None:
        """The node becomes a hole in this pool, and goes when nothing else uses it."""
        assert self.blocks[pool][node] != NONE, f"node {node} names no block"
        self.blocks[pool][node] = NONE
        self.version += 1
        self.unpin(node)

    def clear_blocks(self, pool: int, nodes: Sequence[int]) -> None:
        """`clear_block` of each, for nodes that name a block."""
        self.version += 1
        blocks, uses = self.blocks[pool], self.uses
        for node in nodes:
            blocks[node] = NONE
            uses[node] -= 1
        self._prune(nodes)

    def pin(self, node: int) -> None:
        """Keeps the node and its ancestors, though not their blocks."""
        self.uses[node] += 1

    def move_pin(self, node: int, to: int) -> None:
        uses = self.uses
        uses[to] += 1
        uses[node] -= 1
        if not uses[node]:
            self._prune((node,))

    def unpin(self, node: int) -> None:
        self.uses[node] -= 1
        if not self.uses[node]:
            self._prune((node,))

    def _new_node(self, parent: int, key: bytes) -> int:
        if not self.spare:
            self._add_spare(1)
        node = self.spare.pop()
        self.parent[node] = parent
        self.key[node] = key
        self.uses[node] = 0
        self._ghosts.serial[node] = self._ghosts.take_serials(1)
        return node

    def _add_chain(self, node: int, keys: Sequence[bytes], path: list[int]) -> None:
        """Adds new nodes to `path`: the first below `node`, which has no children then, and so on."""
        parents, child, edges, uses, spare = self.parent, self.child, self.key, self.uses, self.spare
        serial, first = self._ghosts.serial, self._ghosts.take_serials(len(keys))
        if len(spare) < len(keys):
            self._add_spare(len(keys) - len(spare))
        for number, key in enumerate(keys, first):
            new = child[node] = spare.pop()
            uses[node] += 1
            parents[new] = node
            edges[new] = key
            uses[new] = 0
            serial[new] = number
            path.append(new)
            node = new

    def _add_spare(self, count: int) -> None:
        first = len(self.key)
        for nodes in (self.parent, self.child, *self.blocks):
            nodes += [NONE] * count
        self.key += [b""] * count
        self.uses += [DEAD] * count
        self._ghosts.serial += [0] * count
        self.spare[:0] = range(first + count - 1, first - 1, -1)

    def _prune(self, nodes: Iterable[int]) -> None:
        """Those of them that nothing uses go, and their ancestors as far as nothing else uses those."""
        parents, uses, keys, child, spare = self.parent, self.uses, self.key, self.child, self.spare
        gone: list[tuple[int, bytes]] = []
        for node in nodes:
            while not uses[node]:
                parent, key = parents[node], keys[node]
                keys[node] = b""
                uses[node] = DEAD
                spare.append(node)
                if parent == NONE:
                    del self.roots[self.spaces.pop(node)]
                    break
                if child[parent] == MANY:
                    self._leave_fork(parent, key, node)
                else:
                    child[parent] = NONE
                gone.append((parent, key))
                uses[parent] -= 1
                node = parent
        self._ghosts.add(gone)

    def _leave_fork(self, parent: int, key: bytes, node: int) -> None:
        fork, heads, head = self.forks[parent], self._heads[parent], key[:4]
        del fork[key]
        if len(fork) == 1:
            (self.child[parent],) = fork.values()
            del self.forks[parent], self._heads[parent]
            return
        same = heads[head]
        if len(same) == 1:
            del heads[head]
        else:
            del same[node]
