"""One owner's block tables, one per layer group, and how far they are allocated, announced and indexed."""

from __future__ import annotations

import sys

NEVER = sys.maxsize


class Table:
    """Entry i of every group's list holds the KV of tokens i * tokens_per_block and on. Each entry is one lease."""

    __slots__ = ("blocks", "capacity", "commit_at", "cursor", "num_announced", "num_indexed", "num_reused")

    def __init__(self, num_groups: int, *, cursor: int, commit_at: int) -> None:
        self.blocks: tuple[list[int], ...] = tuple([[] for _ in range(num_groups)])
        self.capacity = 0
        """Tokens that fit into the blocks."""
        self.cursor = cursor
        """The pinned index node of the last indexed block (a root when there is none); NONE without an index."""
        self.num_indexed = 0
        """Leading blocks that have a node; the node may name another owner's block with the same tokens."""
        self.commit_at = commit_at
        """Computed tokens at which the next block is full; NEVER when nothing more is to be indexed."""
        self.num_reused = 0
        """Leading blocks that this owner found; a fork counts what its parent found."""
        self.num_announced = 0
        """Leading blocks that `take_new_blocks` has returned."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])
