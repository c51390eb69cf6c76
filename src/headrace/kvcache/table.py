"""One owner's block tables, one per layer group, and how far they are allocated, announced and indexed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from headrace.kvcache.claim import Claim

NEVER = sys.maxsize


@dataclass(slots=True, eq=False)
class Part:
    """The table of one layer group. A recurrent group's stays empty."""

    blocks: list[int] = field(default_factory=list[int])
    """Entry i holds the KV of tokens i * tokens_per_block and on, and is one lease; out of the window it is block 0."""
    first: int = 0
    """Entries before it, sinks aside, are out of the window."""
    num_held: int = 0
    """Entries that are leases."""
    num_entitled: int = 0
    """Blocks that are promised to this owner alone, those held included; 0 without a promise."""
    num_beyond: int = 0
    """Blocks up to its limit beside these: of a window group, which gives others back for them."""


@dataclass(slots=True, eq=False)
class Table:
    claim: Claim
    parts: tuple[Part, ...]
    cursor: int
    """The pinned index node of the last indexed block (a root when there is none); NONE without an index."""
    index_at: int
    """Computed tokens at which the next block is full; NEVER when nothing more is to be indexed."""
    grows: bool = False
    """It may take more than it was promised."""
    landmarks: tuple[int, ...] | None = None
    """In blocks: where the prompt left what was known, and where it ends. Others are likely to go on from there.
    None: entries don't leave as they get out of the window."""
    slide_at: int = NEVER
    """Computed tokens at which the next one does."""
    num_blocks: int = 0
    """Entries of each attention group."""
    capacity: int = 0
    """Tokens that fit into the blocks."""
    num_indexed: int = 0
    """Leading blocks that have a node; the node may name another owner's block with the same tokens."""
    num_reused: int = 0
    """Leading blocks that this owner found; a fork counts what its parent found."""
    num_announced: int = 0
    """Leading blocks that `take_new_blocks` has returned."""
    gone: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(group, entry) that left since."""
    stops: tuple[int, ...] = ()
    """Positions at which recurrent states are saved, ascending."""
    saved: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    """By position: (group, snapshot block), leased and not yet named."""

    @property
    def blocks(self) -> tuple[list[int], ...]:
        return tuple([part.blocks for part in self.parts])

    @property
    def slides(self) -> bool:
        return self.landmarks is not None

    @property
    def commit_at(self) -> int:
        """Computed tokens at which `commit` has something to do."""
        return min(self.index_at, self.slide_at)
