"""A fake engine: the port without a model, for simulation, host-cost benchmarks and server tests. No torch.

Its "KV" is a number per position, a hash of the token and of the slot's seed, and its "logits" are a hash
of everything the block table leads to. So a wrong block, a foreign prefix, a lost copy or a swapped
row changes the tokens that come out, and `reference` says what should have come.
It withholds work until `collect`, runs copies late and out of order over poisoned destinations,
and accepts a random number of drafts.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.seam import (
    DUMMY_BLOCK,
    FROM_DEVICE,
    HOST_TOKEN,
    PROMPT_LOGPROBS,
    SAMPLE,
    EngineFacts,
    GroupSpec,
    RowLogprobs,
    Section,
    SectionResult,
    SlotInit,
    StepPlan,
    StepResult,
    ints,
)

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_POSITIONS = np.arange(1 << 16, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), element-wise."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _M1
        values = (values ^ (values >> np.uint64(27))) * _M2
        return values ^ (values >> np.uint64(31))


def entries(tokens: NDArray[np.int64], seed: int, start: int) -> NDArray[np.uint64]:
    """The fake KV of `tokens` from position `start`."""
    with np.errstate(over="ignore"):
        keyed = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & (2**64 - 1))
        return mix(keyed + _POSITIONS[start : start + len(tokens)])


def next_token(kv: NDArray[np.uint64], vocab_size: int) -> int:
    """What follows a context whose KV is `kv`."""
    with np.errstate(over="ignore"):
        total = mix(np.cumsum(kv)[-1:] if len(kv) else kv)[0]
    return int(total % np.uint64(vocab_size))


def reference(prompt: list[int], count: int, *, vocab_size: int, seed: int = 0) -> list[int]:
    """The tokens that a request must get, from the definition."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(entries(np.asarray(tokens, np.int64), seed, 0), vocab_size))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class Slot:
    init: SlotInit
    last_token: int = -1
    num_tokens: int = 0
    """Tokens whose KV is in the cache."""
    done: bool = False
    table: dict[int, dict[int, int]] = field(default_factory=dict)  # group -> index -> block


@dataclass(slots=True)
class Rank:
    """The state of one section."""

    pools: list[NDArray[np.uint64]]
    slots: dict[int, Slot] = field(default_factory=dict)
    pending: list[tuple[int, int, int, int]] = field(default_factory=list)  # (id, group, source, destination)
    tables: dict[int, dict[int, dict[int, int]]] = field(default_factory=dict)  # slot -> group -> index -> block


class FakeEngine:
    """Implements `seam.EnginePort`. `seed` drives acceptance, lateness and injected row errors."""

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        num_groups: int = 1,
        num_sections: int = 1,
        tokens_per_block: int = 4,
        seed: int = 0,
        error_rate: float = 0.0,
        max_position: int = 4096,
        free_bytes: int = 1 << 30,
    ) -> None:
        self.vocab_size = vocab_size
        self.tokens_per_block = tokens_per_block
        self.error_rate = error_rate
        self.num_groups = num_groups
        self.num_sections = num_sections
        self._random = random.Random(seed)
        self._max_position = max_position
        self._free_bytes = free_bytes
        self._queue: deque[StepPlan] = deque()
        self.ranks: list[Rank] = []
        self._finished: list[int] = []

    def open(self) -> EngineFacts:
        groups = tuple(GroupSpec((group,), 1, 1, "uint64", bytes_per_token=8) for group in range(self.num_groups))
        return EngineFacts(
            model_type="fake",
            vocab_size=self.vocab_size,
            num_valid_ids=self.vocab_size,
            max_position=self._max_position,
            groups=groups,
            weight_bytes=0,
            activation_bytes=0,
            free_bytes=self._free_bytes,
            device="none",
            num_sections=self.num_sections,
        )

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        self.ranks = [
            Rank([np.full((count, self.tokens_per_block), POISON) for count in num_blocks])
            for _ in range(self.num_sections)
        ]

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def collect(self) -> StepResult:
        plan = self._queue.popleft()
        self._finished = []
        results = tuple(self._run(rank, section) for rank, section in zip(self.ranks, plan.sections, strict=True))
        return StepResult(plan.step, results, finished_copies=ints(self._finished))

    def close(self) -> None:
        self._queue.clear()

    # ---- one section -------------------------------------------------------------------------

    def _run(self, rank: Rank, section: Section) -> SectionResult:
        for slot in section.freed_slots.tolist():
            rank.slots.pop(slot, None)
            rank.tables.pop(slot, None)
        for init in section.inits:
            rank.slots[init.slot] = Slot(init)
            rank.tables[init.slot] = {}
        for group, triples in enumerate(section.blocks):
            for slot, index, block in triples.tolist():
                rank.tables.setdefault(slot, {}).setdefault(group, {})[index] = block
        for copy_id, group, _, source, _, destination in section.copies.tolist():
            self._finish_for(rank, group, {source, destination})
            rank.pools[group][destination] = POISON
            rank.pending.append((copy_id, group, source, destination))
        self._finish_some(rank)
        return self._rows(rank, section)

    def _finish_for(self, rank: Rank, group: int, blocks: set[int]) -> None:
        """Run pending copies that someone is about to read from or write to."""
        for copy in [c for c in rank.pending if c[1] == group and (c[3] in blocks)]:
            self._finish(rank, copy)

    def _finish_some(self, rank: Rank) -> None:
        for copy in self._random.sample(rank.pending, len(rank.pending)):
            if self._random.random() < 0.3 and copy in rank.pending:
                self._finish(rank, copy)

    def _finish(self, rank: Rank, copy: tuple[int, int, int, int]) -> None:
        copy_id, group, source, destination = copy
        rank.pending.remove(copy)
        for earlier in [c for c in rank.pending if c[1] == group and c[3] == source]:
            self._finish(rank, earlier)
        rank.pools[group][destination] = rank.pools[group][source]
        self._finished.append(copy_id)

    def _rows(self, rank: Rank, section: Section) -> SectionResult:
        accepted: list[int] = []
        tokens: list[int] = []
        result = SectionResult(ints(), ints())
        offset = 0
        for row in range(section.num_rows):
            slot_id, count = int(section.slot[row]), int(section.num_tokens[row])
            slot = rank.slots[slot_id]
            context = row < section.num_context_rows
            ids = section.ids[offset : offset + count].tolist() if context else []
            offset += len(ids)
            if self._random.random() < self.error_rate:
                result.errors[row] = "injected fault"
                slot.done = True
                accepted.append(0)
                continue
            new = self._row(rank, slot, section, row, ids)
            if int(section.flags[row]) & SAMPLE and slot.init.sampling.logprobs >= 0 and new:
                result.logprobs[row] = self._logprobs(new, slot.init.sampling.logprobs)
            if int(section.flags[row]) & PROMPT_LOGPROBS:
                targets = [*ids[1:], int(section.next_ids[row])]
                targets = [target for target in targets if target >= 0]
                result.prompt_logprobs[row] = self._logprobs(targets, 0)
            accepted.append(len(new))
            tokens.extend(new)
        return SectionResult(ints(accepted), ints(tokens), result.logprobs, result.prompt_logprobs, {}, result.errors)

    def _logprobs(self, chosen: list[int], count: int) -> RowLogprobs:
        """Made up, but a function of the chosen tokens: candidate r is chosen + r with value -(1 + r / 8)."""
        ids = np.asarray([[token, *((token + at) % self.vocab_size for at in range(count))] for token in chosen])
        values = np.asarray([[-1.0, *(-1.0 - at / 8 for at in range(count))] for _ in chosen])
        return RowLogprobs(
            ints(ids).reshape(len(chosen), 1 + count),
            values.astype(np.float32).reshape(len(chosen), 1 + count),
            np.ones(len(chosen), np.int32),
        )

    def _row(self, rank: Rank, slot: Slot, section: Section, row: int, ids: list[int]) -> list[int]:
        start, flags = int(section.start[row]), int(section.flags[row])
        drafts = int(section.num_drafts[row])
        if start == FROM_DEVICE:
            if slot.done:
                return []
            ids, start = [slot.last_token], slot.num_tokens
        self._write(rank, slot, ids, start)
        slot.num_tokens = start + len(ids)
        if not flags & SAMPLE:
            return []
        new = [self._choose(rank, slot)]
        if flags & HOST_TOKEN:
            return new
        self._take(slot, new[0])
        accept = self._random.randint(0, drafts)
        for at in range(drafts):
            if at >= accept or slot.done:
                # A rejected draft leaves its KV behind, past what counts.
                limit = min(slot.num_tokens + drafts - at, slot.init.max_len) - slot.num_tokens
                self._write(rank, slot, [self.vocab_size + 7] * max(limit, 0), slot.num_tokens)
                break
            self._write(rank, slot, [new[-1]], slot.num_tokens)
            slot.num_tokens += 1
            new.append(self._choose(rank, slot))
            self._take(slot, new[-1])
        return new

    def _take(self, slot: Slot, token: int) -> None:
        init = slot.init
        slot.last_token = token
        length = slot.num_tokens + 1
        slot.done = (token in init.stop_ids and length > init.min_len) or length >= init.max_len

    def _choose(self, rank: Rank, slot: Slot) -> int:
        token = next_token(self._read(rank, slot), self.vocab_size)
        init = slot.init
        if slot.num_tokens + 1 <= init.min_len:
            while token in init.stop_ids:
                token = (token + 1) % self.vocab_size
        return token

    def _write(self, rank: Rank, slot: Slot, ids: list[int], start: int) -> None:
        values = entries(np.asarray(ids, np.int64), slot.init.sampling.seed, start)
        for group, pool in enumerate(rank.pools):
            table = rank.tables[slot.init.slot].get(group, {})
            for at, value in enumerate(values.tolist(), start):
                index, inside = divmod(at, self.tokens_per_block)
                block = table.get(index, DUMMY_BLOCK)
                assert block != DUMMY_BLOCK, f"position {at} of slot {slot.init.slot} has no block"
                self._finish_for(rank, group, {block})
                pool[block, inside] = np.uint64(value)

    def _read(self, rank: Rank, slot: Slot) -> NDArray[np.uint64]:
        """The context's KV through the block tables; every group must hold the same."""
        length = slot.num_tokens
        out: NDArray[np.uint64] | None = None
        for group, pool in enumerate(rank.pools):
            table = rank.tables[slot.init.slot].get(group, {})
            blocks = [table.get(index, DUMMY_BLOCK) for index in range(-(-length // self.tokens_per_block))]
            self._finish_for(rank, group, set(blocks))
            kv = pool[blocks].reshape(-1)[:length]
            assert out is None or (kv == out).all(), f"groups disagree about slot {slot.init.slot}"
            out = kv
        assert out is not None
        return out
