"""What the fake engine computes and where it keeps it: a made-up model, its pools on three tiers, copies, transfers.

The model. `hidden` of a position is a hash of its token, of all KV entries in reach of its layer groups' queries
and of the recurrent states before it; the position's KV entries, its recurrent states and the token that follows
are hashes of `hidden`. So every number depends on the whole sequence, and whatever is read from a wrong place
changes all that follows. `Alone` is the definition.

The memory. A copy is done when somebody needs it, or late, and its destination is poison until then. From the plan
that asks for a transfer to the result that reports it, nobody may touch its destination or write its source.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.seam import DEVICE, DISK, DUMMY_BLOCK, HOST, GroupSpec, Ints, PoolSizes
from headrace.types import MediaSpan

Words = NDArray[np.uint64]
Place = tuple[int, int, int]
"""(tier, group, block)."""

POISON = 0xDEAD_BEEF_DEAD_BEEF
NO_STAMP = -1
HIDDEN_SIZE = 4
MASK = (1 << 64) - 1
_TOKEN, _POSITION, _SEED, _GROUP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB


def full_group(layer: int = 0) -> GroupSpec:
    return GroupSpec((layer,), 1, 1, "uint64", bytes_per_token=8)


def window_group(window: int, *, sink_tokens: int = 0, layer: int = 1) -> GroupSpec:
    return GroupSpec((layer,), 1, 1, "uint64", window=window, bytes_per_token=8, sink_tokens=sink_tokens)


def recurrent_group(layer: int = 2) -> GroupSpec:
    return GroupSpec((layer,), 0, 0, "uint64", state_bytes=16)


# ---- the model -----------------------------------------------------------------------------------


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) of 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def token_key(token: int, position: int, seed: int, media: Sequence[MediaSpan] = ()) -> int:
    """What a position brings by itself: the seed stands for salt and adapter, and a media item for its content."""
    for span in media:
        if span.start <= position < span.start + span.length:
            seed += int.from_bytes(span.digest[:8], "little")
    return ((token + 1) * _TOKEN + position * _POSITION + seed * _SEED) & MASK


def hidden_of(key: int, reads: Sequence[int]) -> int:
    """`reads`: by group, the sum of the entries in reach, or the state before the position."""
    for group, value in enumerate(reads):
        key += mix((value + (group + 1) * _GROUP) & MASK)
    return mix(key & MASK)


def hidden_vector(hidden: int) -> NDArray[np.float32]:
    """[HIDDEN_SIZE] of small whole numbers, whose sums are exact."""
    return np.asarray([hidden >> (16 * at) & 0xFF for at in range(HIDDEN_SIZE)], np.float32)


def entry_of(hidden: int, group: int) -> int:
    return mix((hidden + group * _GROUP) & MASK)


def state_of(hidden: int, group: int, before: int) -> int:
    return mix((hidden + before + group * _GROUP) & MASK)


def next_token(hidden: int, vocab_size: int) -> int:
    return mix((hidden + _SEED) & MASK) % vocab_size


def in_reach(spec: GroupSpec, position: int) -> list[int]:
    """Earlier positions that the query at `position` reads."""
    if spec.window is None:
        return list(range(position))
    first = max(0, position - spec.window + 1)
    return [*range(min(spec.sink_tokens, first)), *range(first, position)]


class Alone:
    """One sequence computed by itself, from the definition: no blocks, no batch."""

    def __init__(self, groups: Sequence[GroupSpec], *, seed: int = 0, media: Sequence[MediaSpan] = ()) -> None:
        self.groups = groups
        self.seed = seed
        self.media = media
        self.entries: list[list[int]] = [[] for _ in groups]
        """By group and position; of a recurrent group the states after each position."""
        self.hidden = 0

    def feed(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            position = len(self.entries[0])
            reads = [self._read(group, position) for group in range(len(self.groups))]
            self.hidden = hidden_of(token_key(token, position, self.seed, self.media), reads)
            for group, spec in enumerate(self.groups):
                state = spec.is_recurrent
                value = state_of(self.hidden, group, reads[group]) if state else entry_of(self.hidden, group)
                self.entries[group].append(value)

    def _read(self, group: int, position: int) -> int:
        spec, entries = self.groups[group], self.entries[group]
        if spec.is_recurrent:
            return entries[-1] if entries else 0
        if spec.window is None:
            return sum(entries) & MASK
        return sum(entries[at] for at in in_reach(spec, position)) & MASK


def reference(
    prompt: Sequence[int], count: int, *, vocab_size: int, seed: int = 0, groups: Sequence[GroupSpec] | None = None
) -> list[int]:
    """The tokens that a request must get, from the definition."""
    alone = Alone(groups or (full_group(),), seed=seed)
    alone.feed(prompt)
    out: list[int] = []
    for _ in range(count):
        out.append(next_token(alone.hidden, vocab_size))
        alone.feed(out[-1:])
    return out


def reference_embedding(
    prompt: Sequence[int],
    pooling: str,
    *,
    seed: int = 0,
    groups: Sequence[GroupSpec] | None = None,
    media: Sequence[MediaSpan] = (),
) -> NDArray[np.float32]:
    """What a request with `pooling` must get."""
    alone = Alone(groups or (full_group(),), seed=seed, media=media)
    each: list[NDArray[np.float32]] = []
    for token in prompt:
        alone.feed([token])
        each.append(hidden_vector(alone.hidden))
    return each[-1] if pooling == "last" else (np.sum(each, axis=0) / len(each)).astype(np.float32)


# ---- the memory ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A copy, or a transfer with its stamp."""

    id: int
    source: Place
    destination: Place
    stamp: int = NO_STAMP


@dataclass(slots=True)
class Disk:
    """What outlives an engine. A block without a stamp was never wholly written."""

    blocks: list[Words] = field(default_factory=list[Words])
    stamps: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])

    def fit(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Keeps what is there when it has these shapes; else begins anew."""
        if [blocks.shape for blocks in self.blocks] != list(shapes):
            self.blocks = [np.full(shape, POISON, np.uint64) for shape in shapes]
            self.stamps = [np.full(shape[0], NO_STAMP, np.int64) for shape in shapes]


class Memory:
    """The pools of one section on every tier. Of a recurrent group a block is (state, tokens it has seen)."""

    def __init__(self, groups: Sequence[GroupSpec], sizes: PoolSizes, disk: Disk, *, tokens_per_block: int) -> None:
        self.groups = groups
        self.tokens_per_block = tokens_per_block
        self.disk = disk
        widths = [2 if spec.is_recurrent else tokens_per_block for spec in groups]
        counts = {DEVICE: sizes.num_blocks, HOST: sizes.host_blocks, DISK: sizes.disk_blocks}
        self.tiers: dict[int, list[Words]] = {}
        for tier, blocks in counts.items():
            assert not blocks or len(blocks) == len(groups), f"tier {tier} has {len(blocks)} pools"
            shapes = list(zip(blocks, widths))
            if tier == DISK:
                disk.fit(shapes)
                self.tiers[tier] = disk.blocks
            else:
                self.tiers[tier] = [np.full(shape, POISON, np.uint64) for shape in shapes]
        self.copies: list[Move] = []
        """Ordered and not done yet."""
        self.transfers: list[Move] = []
        """Begun and not done yet."""
        self.owned: dict[Place, int] = {}
        """By place, the transfer that has it, from `promise` to the report: its id, or ~id of its source."""
        self.copying: Counter[Place] = Counter()
        """Ends of copies that are not reported."""
        self.unreported: list[tuple[Move, bool]] = []
        """Done: (move, failed)."""
        self.busy: dict[Place, int] = {}
        """What was owned when the plan that runs was submitted."""

    def promise(self, copies: Ints, transfers: Ints) -> dict[Place, int]:
        """A plan was submitted. -> what is owned by transfers from its point of view."""
        for move in map(copy_move, copies.tolist()):
            self._check_move(move)
            assert {move.source[0], move.destination[0]} <= {DEVICE, HOST}, f"copy {move.id} between these tiers"
            assert DEVICE in (move.source[0], move.destination[0]), f"copy {move.id} from host to host"
            self.copying.update((move.source, move.destination))
        for move in map(transfer_move, transfers.tolist()):
            self._check_move(move)
            ways = ((DEVICE, HOST), (HOST, DISK), (DISK, HOST))
            assert (move.source[0], move.destination[0]) in ways, f"transfer {move.id} between these tiers"
            for place, owner in ((move.source, ~move.id), (move.destination, move.id)):
                assert place not in self.owned, f"transfers {self.owned[place]} and {move.id} both have {place}"
                self.owned[place] = owner
            place = move.destination
            assert not self.copying[place], f"transfer {move.id} fills {place}, an end of a copy that is not reported"
        return self.owned.copy()

    def _check_move(self, move: Move) -> None:
        assert move.source != move.destination, f"move {move.id} goes nowhere"
        for tier, group, block in (move.source, move.destination):
            assert group < len(self.tiers[tier]), f"move {move.id}: tier {tier} has no group {group}"
            assert DUMMY_BLOCK < block < len(self.tiers[tier][group]), f"move {move.id}: block {block} of tier {tier}"

    def begin(self, copies: Ints, transfers: Ints) -> None:
        """The plan runs: its copies in order, its transfers beside it."""
        for move in map(copy_move, copies.tolist()):
            self.check_free(move.source, write=False)
            self.check_free(move.destination, write=True)
            self.before_write(move.destination)
            self._poison(move.destination)
            self.copies.append(move)
        for move in map(transfer_move, transfers.tolist()):
            unfilled = [copy.id for copy in self.copies if copy.destination == move.source]
            assert not unfilled, f"transfer {move.id} reads {move.source}, which copy {unfilled} has not filled"
            self._poison(move.destination)
            self.transfers.append(move)

    def check_free(self, place: Place, *, write: bool) -> None:
        owner = self.busy.get(place)
        if owner is not None:
            assert owner < 0 and not write, f"{place} is used while transfer {max(owner, ~owner)} has it"

    def before_read(self, place: Place) -> None:
        if self.copies:
            for move in [move for move in self.copies if move.destination == place]:
                self.finish_copy(move)

    def before_write(self, place: Place) -> None:
        if self.copies:
            for move in [move for move in self.copies if place in (move.destination, move.source)]:
                self.finish_copy(move)

    def finish_copy(self, move: Move) -> None:
        """Does a copy, and before it those that it comes after."""
        if move not in self.copies:
            return  # done as an earlier one of another
        earlier = self.copies[: self.copies.index(move)]
        ends = (move.source, move.destination)
        for other in [it for it in earlier if it.destination in ends or it.source == move.destination]:
            self.finish_copy(other)
        self.copies.remove(move)
        self._copy_block(move)
        self.unreported.append((move, False))

    def _copy_block(self, move: Move) -> None:
        (tier, group, block), (to_tier, _, to_block) = move.source, move.destination
        self.tiers[to_tier][group][to_block] = self.tiers[tier][group][block]

    def finish_transfer(self, move: Move, *, failed: bool) -> None:
        self.transfers.remove(move)
        (tier, group, block), (to_tier, _, to_block) = move.source, move.destination
        failed = failed or (tier == DISK and not self.accepts_stamp(group, block, move.stamp))
        if not failed:
            self._copy_block(move)
            if to_tier == DISK:
                self.disk.stamps[group][to_block] = move.stamp
        self.unreported.append((move, failed))

    def accepts_stamp(self, group: int, block: int, stamp: int) -> bool:
        return int(self.disk.stamps[group][block]) == stamp

    def _poison(self, place: Place) -> None:
        tier, group, block = place
        self.tiers[tier][group][block] = POISON
        if tier == DISK:
            self.disk.stamps[group][block] = NO_STAMP

    def advance(self, rng: random.Random, *, lateness: float, failure_rate: float) -> tuple[list[int], list[int]]:
        """Does some of what is open and reports some of what is done. -> (ids done, ids failed among them)"""
        for move in rng.sample(self.copies, len(self.copies)):
            if rng.random() >= lateness:
                self.finish_copy(move)
        for move in rng.sample(self.transfers, len(self.transfers)):
            if rng.random() >= lateness:
                self.finish_transfer(move, failed=rng.random() < failure_rate)
        rng.shuffle(self.unreported)
        done: list[int] = []
        failures: list[int] = []
        for move, failed in self.unreported.copy():
            if rng.random() < lateness:
                continue
            self.unreported.remove((move, failed))
            done.append(move.id)
            if failed:
                failures.append(move.id)
            for place in (move.source, move.destination):
                if self.owned.get(place) in (move.id, ~move.id):
                    del self.owned[place]
                elif self.copying[place]:
                    self.copying[place] -= 1
        return done, failures


def copy_move(values: list[int]) -> Move:
    copy_id, group, source_tier, source, tier, block = values
    return Move(copy_id, (source_tier, group, source), (tier, group, block))


def transfer_move(values: list[int]) -> Move:
    stamp = values.pop()
    move = copy_move(values)
    return Move(move.id, move.source, move.destination, stamp)
