"""What of a known path of nodes may be reused, as plain functions over integers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from headrace.kvcache.radix import NONE
from headrace.seam import GroupSpec

Names = tuple[list[int], ...]
"""Of one group: by tier, by node, the block or NONE."""

NO_PREFIX, EVICTED, GRANULARITY, SALT = "no_prefix", "evicted", "granularity", "salt"


class Found(NamedTuple):
    """What a prompt may reuse now."""

    path: list[int]
    """The known nodes of its whole blocks, holes included."""
    length: int
    """Of them are reused, from the first."""
    source: int
    """The node whose block is reused in part, or NONE."""
    num_partial: int
    """Tokens of it."""
    num_tokens: int
    """All tokens reused."""
    missed: bytes = b""
    """The edge behind the path, which is not in the index; b"" where it had not to be looked for."""


NOTHING = Found([], 0, NONE, 0, 0)


def is_there(names: Names, node: int) -> bool:
    return any(blocks[node] != NONE for blocks in names)


def first_needed(group: GroupSpec, num_tokens: int, tokens_per_block: int) -> int:
    """The first block in reach of the query at `num_tokens` and of later ones, sinks left aside."""
    if group.window is None:
        return 0
    return max(0, num_tokens - group.window + 1) // tokens_per_block


def num_sinks(group: GroupSpec, tokens_per_block: int) -> int:
    """Blocks that hold sink tokens."""
    return 0 if group.window is None else -(-group.sink_tokens // tokens_per_block)


def most_at_rest(group: GroupSpec, tokens_per_block: int) -> int:
    """Blocks that a sequence of any length holds at a time, at worst; `sys.maxsize` is no bound.

    A sequence with n tokens in flight (from the first whose computation isn't committed to the last with a block) holds
    at most floor(n / tokens_per_block) more: all sequences together never more than `blocks_in_flight` beside these.
    """
    if group.is_recurrent:
        return 0
    if group.window is None:
        return sys.maxsize
    return -(-(group.window - 1) // tokens_per_block) + 2 + num_sinks(group, tokens_per_block)


def blocks_in_flight(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks of a window group that sequences hold for so many tokens in flight, of all of them together."""
    return num_tokens // tokens_per_block


def longest(path: Sequence[int], groups: Sequence[tuple[GroupSpec, Names]], tokens_per_block: int) -> int:
    """The most blocks of `path` that every group can provide."""
    length = len(path)
    while length:
        before = length
        for group, names in groups:
            length = _longest_of(path, length, group, names, tokens_per_block)
        if length == before:
            break
    return length


def _longest_of(path: Sequence[int], length: int, group: GroupSpec, names: Names, tokens_per_block: int) -> int:
    """The most blocks, `length` or fewer, that this group can provide."""
    if group.is_recurrent:
        while length and not is_there(names, path[length - 1]):
            length -= 1
        return length
    if group.window is None:
        return _first_hole(path, 0, length, names)
    length = _first_hole(path, 0, min(length, num_sinks(group, tokens_per_block)), names, otherwise=length)
    while length:
        hole = _last_hole(path, first_needed(group, length * tokens_per_block, tokens_per_block), length, names)
        if hole < 0:
            break
        length = hole
    return length


def _first_hole(path: Sequence[int], start: int, end: int, names: Names, otherwise: int = -1) -> int:
    """`end` (or `otherwise`) when there is none."""
    if len(names) == 1:  # no tiers: the many
        blocks = names[0]
        for at in range(start, end):
            if blocks[path[at]] == NONE:
                return at
    else:
        for at in range(start, end):
            if not is_there(names, path[at]):
                return at
    return end if otherwise < 0 else otherwise


def _last_hole(path: Sequence[int], start: int, end: int, names: Names) -> int:
    for at in range(end - 1, start - 1, -1):
        if not is_there(names, path[at]):
            return at
    return -1


def is_copy_cheaper(num_bytes: int, num_tokens: int, *, copy_bytes_per_s: float, tokens_per_s: float) -> bool:
    """Whether bringing blocks back takes less time than computing their tokens; unknown speeds say yes."""
    if copy_bytes_per_s <= 0.0 or tokens_per_s <= 0.0:
        return True
    return num_bytes * tokens_per_s < num_tokens * copy_bytes_per_s
