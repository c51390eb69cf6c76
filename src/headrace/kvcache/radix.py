"""The radix index: which blocks hold the KV of which tokens, by namespace and prefix.

A node stands for one full block of tokens after one exact prefix, and names at most one block per pool (one pool per
layer group and tier). A node is an index into flat lists. An edge is the bytes of the block's token ids, so finding
a child compares or hashes each block of a prompt once and its prefix never.

A node lives while it is used: by a block it names, by a child, or by a pin. A node without a block in some pool is a
hole there; its descendants can't be reached through that pool until somebody computes those tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = "Sequence[int] | NDArray[np.signedinteger[Any]]"
"""Token ids; each fits into 32 bits."""

NONE = -1
MANY = -2
"""In `child`: the node has two or more children, which are in `forks`."""
DEAD = -1
"""In `uses`: the node id is spare."""


class Namespace(NamedTuple):
    """All that changes K and V besides the tokens. Blocks of two namespaces are never shared.

    Compared as a tuple of typed values, so no value can run over into its neighbour.
    """

    salt: str = ""
    adapter: int = 0
    """Load id of the LoRA adapter; 0 is the base model."""
    revision: str = ""
    """Of the model's weights."""
    dtypes: tuple[str, ...] = ()
    """KV dtype of each layer group."""


class RadixIndex:
    def __init__(self, tokens_per_block: int, *, num_pools: int) -> None:
        self.tokens_per_block = tokens_per_block
        self._pack = Struct(f"<{tokens_per_block}i").pack
        self.parent: list[int] = []
        self.child: list[int] = []
        """The only child, or NONE, or MANY."""
        self.forks: dict[int, dict[bytes, int]] = {}
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

    @property
    def num_nodes(self) -> int:
        """Roots included."""
        return len(self.key) - len(self.spare)

    def edge(self, tokens: Tokens, at: int) -> bytes:
        """The key of block `at` of a sequence."""
        start = at * self.tokens_per_block
        part = tokens[start : start + self.tokens_per_block]
        if isinstance(part, np.ndarray):
            return part.astype("<i4").tobytes()
        return self._pack(*part)

    def walk(self, space: Namespace, tokens: Tokens, max_blocks: int) -> list[int]:
        """The nodes of the longest known prefix of whole blocks, the first block's node first; holes included."""
        path: list[int] = []
        node = self.roots.get(space, NONE)
        if node == NONE:
            return path
        child, known, forks = self.child, self.key, self.forks
        for at in range(max_blocks):
            below = child[node]
            if below == NONE:
                break
            key = self.edge(tokens, at)
            if below == MANY:
                node = forks[node].get(key, NONE)
                if node == NONE:
                    break
            elif known[below] == key:
                node = below
            else:
                break
            path.append(node)
        return path

    def root(self, space: Namespace) -> int:
        """The namespace's root, made when it isn't there. Pin it or give it a child before anything else."""
        node = self.roots.get(space, NONE)
        if node == NONE:
            node = self._new_node(NONE, b"")
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
        else:
            other = self.key[below]
            if other == key:
                return below
            new = self._new_node(node, key)
            self.forks[node] = {other: below, key: new}
            self.child[node] = MANY
        self.uses[node] += 1
        return new

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

    def clear_block(self, pool: int, node: int) -> None:
        """The node becomes a hole in this pool, and goes when nothing else uses it."""
        assert self.blocks[pool][node] != NONE, f"node {node} names no block"
        self.blocks[pool][node] = NONE
        self.unpin(node)

    def clear_blocks(self, pool: int, nodes: Iterable[int]) -> None:
        """`clear_block` of each, for nodes that name a block."""
        blocks, uses = self.blocks[pool], self.uses
        for node in nodes:
            blocks[node] = NONE
            uses[node] -= 1
            if not uses[node]:
                self._prune(node)

    def pin(self, node: int) -> None:
        """Keeps the node and its ancestors, though not their blocks."""
        self.uses[node] += 1

    def unpin(self, node: int) -> None:
        self.uses[node] -= 1
        if not self.uses[node]:
            self._prune(node)

    def _new_node(self, parent: int, key: bytes) -> int:
        if self.spare:
            node = self.spare.pop()
            self.parent[node] = parent
            self.key[node] = key
            self.uses[node] = 0
            return node
        node = len(self.key)
        self.parent.append(parent)
        self.child.append(NONE)
        self.key.append(key)
        self.uses.append(0)
        for blocks in self.blocks:
            blocks.append(NONE)
        return node

    def _prune(self, node: int) -> None:
        while not self.uses[node]:
            parent = self.parent[node]
            if parent == NONE:
                del self.roots[self.spaces.pop(node)]
            elif self.child[parent] == MANY:
                fork = self.forks[parent]
                del fork[self.key[node]]
                if len(fork) == 1:
                    (self.child[parent],) = fork.values()
                    del self.forks[parent]
            else:
                self.child[parent] = NONE
            self.key[node] = b""
            self.uses[node] = DEAD
            self.spare.append(node)
            if parent == NONE:
                return
            self.uses[parent] -= 1
            node = parent
