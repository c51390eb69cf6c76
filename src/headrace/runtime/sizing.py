"""How many blocks each layer group gets: plain arithmetic on integers, for `settle` and for `headrace plan` alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.kvcache.reuse import most_at_once
from headrace.seam import GroupSpec

DEFAULT_AVG_SEQ_LEN = 4096
"""Of a sequence, where `avg_seq_len` says nothing and the longest one is not shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What decides how many blocks of a group one sequence holds at a time."""

    tokens_per_block: int
    max_tokens_in_flight: int
    """Of one sequence: the steps that may be planned before their tokens are known."""
    snapshot_interval: int = 0
    """Tokens between snapshots of recurrent states; 0 takes none."""
    num_extra_snapshots: int = 0
    """Of one sequence, beside the periodic ones."""

    @property
    def takes_snapshots(self) -> bool:
        return self.snapshot_interval > 0 or self.num_extra_snapshots > 0

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def bound(self, group: GroupSpec) -> int | None:
        """The most blocks of a group that a sequence of any length holds at a time; None is no such bound."""
        if group.is_recurrent:
            return 2 if self.takes_snapshots else 1
        most = most_at_once(group, self.max_tokens_in_flight, self.tokens_per_block)
        return None if most == sys.maxsize else most

    def at_least(self, group: GroupSpec, length: int) -> int:
        """Blocks without which a lone sequence of this length could not run."""
        bound = self.bound(group)
        if group.is_recurrent:
            assert bound is not None
            return bound  # one snapshot to begin from, one being taken
        return self.blocks_of(length) if bound is None else min(self.blocks_of(length), bound)

    def wanted(self, group: GroupSpec, length: int) -> int:
        """Blocks that a sequence of this length is glad to have: of recurrent layers, all of its snapshots."""
        if not group.is_recurrent:
            return self.at_least(group, length)
        periodic = length // self.snapshot_interval if self.snapshot_interval else 0
        return periodic + self.num_extra_snapshots

    def tokens_held(self, groups: Sequence[GroupSpec], usable: Sequence[int]) -> int | None:
        """Tokens of the longest sequence that so many usable blocks of each group can hold; None is any length."""
        limits = [
            count * self.tokens_per_block
            for group, count in zip(groups, usable, strict=True)
            if (bound := self.bound(group)) is None or count < bound
            if not group.is_recurrent
        ]
        return min(limits, default=None)

    def sequences_held(self, groups: Sequence[GroupSpec], usable: Sequence[int], length: int) -> int | None:
        """Sequences of this length whose blocks fit at the same time, none of them shared; None is any number.

        Snapshots don't count: a sequence runs without one.
        """
        counts = [
            count // self.at_least(group, length)
            for group, count in zip(groups, usable, strict=True)
            if not group.is_recurrent
        ]
        return min(counts, default=None)


@dataclass(frozen=True, slots=True)
class Pools:
    """Usable blocks by group; each pool has one block more, which is never used."""

    usable: tuple[int, ...]
    size_bytes: int
    """Unused blocks included."""

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return tuple(count + 1 for count in self.usable)


def pool_bytes(groups: Sequence[GroupSpec], usable: Sequence[int], tokens_per_block: int) -> int:
    sizes = (group.block_bytes(tokens_per_block) for group in groups)
    return sum((count + 1) * size for count, size in zip(usable, sizes, strict=True))


def longest_that_fits(groups: Sequence[GroupSpec], demand: Demand, budget_bytes: int, limit: int) -> int:
    """Tokens, at most `limit`, of the longest lone sequence whose blocks take no more than the budget; 0 is none."""

    def fits(length: int) -> bool:
        usable = [max(demand.at_least(group, length), 1) for group in groups]
        return pool_bytes(groups, usable, demand.tokens_per_block) <= budget_bytes

    return _largest(limit, fits)


def share_out(
    groups: Sequence[GroupSpec],
    demand: Demand,
    budget_bytes: int,
    *,
    longest: int,
    average: int,
    max_tokens: int | None = None,
) -> Pools:
    """Pools in proportion to what an average sequence wants, none smaller than what the longest one needs.

    The blocks of `longest` have to fit (`longest_that_fits`).

    Args:
        max_tokens: no pool holds more tokens than this.
    """
    floors = [max(demand.at_least(group, longest), 1) for group in groups]
    wanted = [demand.wanted(group, average) for group in groups]
    caps = [_cap(group, demand, max_tokens) for group in groups]
    unit = max(*wanted, 1)

    def usable(level: int) -> list[int]:
        """With `level` blocks of the group that wants most."""
        levels = [level * want // unit for want in wanted]
        return [
            share if cap is None else min(share, cap) for share, cap in zip(map(max, floors, levels), caps, strict=True)
        ]

    def fits(level: int) -> bool:
        return pool_bytes(groups, usable(level), demand.tokens_per_block) <= budget_bytes

    smallest = min(group.block_bytes(demand.tokens_per_block) for group in groups)
    level = _largest(budget_bytes // smallest, fits)
    counts = tuple(usable(level))
    return Pools(counts, pool_bytes(groups, counts, demand.tokens_per_block))


def share_by_ratio(
    groups: Sequence[GroupSpec],
    demand: Demand,
    budget_bytes: int,
    *,
    ratio: Sequence[float],
    max_tokens: int | None = None,
) -> Pools:
    """Pools of stated shares of the budget.

    Raises:
        ValueError: a share that holds no block.
    """
    counts: list[int] = []
    for index, (group, share) in enumerate(zip(groups, ratio, strict=True)):
        size = group.block_bytes(demand.tokens_per_block)
        count = int(budget_bytes * share) // size - 1
        if count < 1:
            raise ValueError(
                f"kv_cache_config.pool_ratio: the share {share} of layer group {index} is {int(budget_bytes * share):,}"
                f" bytes and two of its blocks take {2 * size:,}: raise it"
            )
        cap = _cap(group, demand, max_tokens)
        counts.append(count if cap is None else min(count, cap))
    return Pools(tuple(counts), pool_bytes(groups, counts, demand.tokens_per_block))


def share_tier(groups: Sequence[GroupSpec], tokens_per_block: int, device: Pools, size_bytes: int) -> tuple[int, ...]:
    """Blocks by group, the unused one included, of a tier with room for `size_bytes`: as the device's pools are.

    Raises:
        ValueError: with the bytes that are needed, when the tier can't hold a block of every group.
    """
    sizes = [group.block_bytes(tokens_per_block) for group in groups]
    least = 2 * sum(sizes)
    if size_bytes < least:
        raise ValueError(f"{size_bytes:,} bytes hold no block of each layer group: at least {least:,} are needed")

    def counts(level: int) -> list[int]:
        return [max(level * count // device.usable[0], 1) for count in device.usable]

    level = _largest(
        size_bytes // sizes[0], lambda level: pool_bytes(groups, counts(level), tokens_per_block) <= size_bytes
    )
    return tuple(count + 1 for count in counts(level))


def _cap(group: GroupSpec, demand: Demand, max_tokens: int | None) -> int | None:
    if max_tokens is None:
        return None
    if group.is_recurrent:
        return max(demand.wanted(group, max_tokens), demand.at_least(group, max_tokens))
    return max_tokens // demand.tokens_per_block


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number of 0 to `limit` for which something holds that holds for all smaller ones; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
