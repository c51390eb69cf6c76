"""How many blocks each layer group gets: plain arithmetic on integers, for `settle` and for `headrace plan` alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.kvcache.reuse import blocks_in_flight, most_at_rest
from headrace.seam import GroupSpec

DEFAULT_AVG_SEQ_LEN = 4096
"""Of a sequence, where `avg_seq_len` says nothing and the longest one is not shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What decides how many blocks of a group sequences hold at a time."""

    tokens_per_block: int
    max_tokens_in_flight: int
    """Of all sequences: the steps that may be planned before their tokens are known."""
    max_sequences: int | None = None
    """At a time; None is no bound."""
    keeps_prefixes: bool = True
    """The blocks of sequences that have ended, or gone on, can be reused."""
    has_beams: bool = False
    """They keep their blocks when these are out of the window."""
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

    def rest(self, group: GroupSpec, length: int) -> int:
        """Blocks of an attention group that a sequence of this length holds beside those of tokens in flight."""
        return min(self.blocks_of(length), most_at_rest(group, self.tokens_per_block))

    def bound(self, group: GroupSpec, *, num_sequences: int = 1) -> int | None:
        """The most blocks of a group that so many sequences of any length hold at a time; None is no such bound."""
        if group.is_recurrent:
            return num_sequences * (2 if self.takes_snapshots else 1)
        if group.window is None:
            return None
        in_flight = blocks_in_flight(self.max_tokens_in_flight, self.tokens_per_block)
        return num_sequences * most_at_rest(group, self.tokens_per_block) + in_flight

    def at_least(self, group: GroupSpec, length: int) -> int:
        """Blocks without which a lone sequence of this length could not run."""
        bound = self.bound(group)
        if group.is_recurrent:
            assert bound is not None
            return bound  # one snapshot to begin from, one being taken
        return self.blocks_of(length) if bound is None else min(self.blocks_of(length), bound)

    def wanted(self, group: GroupSpec, length: int) -> int:
        """Blocks that a sequence of this length is glad to have: of recurrent layers, all of its snapshots; of windows,
        when it has ended too, what whoever goes on from there needs."""
        if not group.is_recurrent:
            return self.blocks_of(length) if self.has_beams else self.rest(group, length)
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
            self._sequences_of(group, count, length)
            for group, count in zip(groups, usable, strict=True)
            if not group.is_recurrent
        ]
        return min(counts, default=None)

    def _sequences_of(self, group: GroupSpec, count: int, length: int) -> int:
        whole, rest = self.blocks_of(length), self.rest(group, length)
        if rest == whole:
            return count // whole
        in_flight = blocks_in_flight(self.max_tokens_in_flight, self.tokens_per_block)
        return max(count // whole, (count - in_flight) // rest)

    def cap(self, group: GroupSpec, max_tokens: int | None) -> int | None:
        """Blocks of a group beyond which none is of use; None is any number.

        Args:
            max_tokens: no pool holds more tokens than this.
        """
        most: int | None = None
        if not (self.keeps_prefixes or self.has_beams or group.is_recurrent or self.max_sequences is None):
            most = self.bound(group, num_sequences=self.max_sequences)
        if max_tokens is None:
            return most
        held = max_tokens // self.tokens_per_block
        if group.is_recurrent:
            held = max(self.wanted(group, max_tokens), self.at_least(group, max_tokens))
        return held if most is None else min(most, held)


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

    Windows get what tokens in flight take once, and then a window for each average sequence that the other pools hold.
    The blocks of `longest` have to fit (`longest_that_fits`).

    Args:
        max_tokens: no pool holds more tokens than this.
    """
    floors = [max(demand.at_least(group, longest), 1) for group in groups]
    wanted = [demand.wanted(group, average) for group in groups]
    caps = [demand.cap(group, max_tokens) for group in groups]
    in_flight = [
        0 if group.is_recurrent else floor - demand.rest(group, longest)
        for group, floor in zip(groups, floors, strict=True)
    ]
    unit = max(*wanted, 1)

    def usable(level: int) -> list[int]:
        """With `level` blocks of the group that wants most."""
        levels = [more + level * want // unit for more, want in zip(in_flight, wanted, strict=True)]
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
        cap = demand.cap(group, max_tokens)
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

    unit = max(device.usable)

    def counts(level: int) -> list[int]:
        """With `level` blocks of the group that has most."""
        return [max(level * count // unit, 1) for count in device.usable]

    level = _largest(
        size_bytes // min(sizes), lambda level: pool_bytes(groups, counts(level), tokens_per_block) <= size_bytes
    )
    return tuple(count + 1 for count in counts(level))


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number of 0 to `limit` for which something holds that holds for all smaller ones; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
