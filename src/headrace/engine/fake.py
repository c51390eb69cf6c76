"""A fake engine: the port without a model, for simulation, host-cost benchmarks and server tests. No torch.

It obeys the whole seam over the made-up model of `fake_memory`, where every token depends on everything that was
read: a wrong block, a foreign prefix, a lost copy, a wrong snapshot or a swapped row changes the tokens that come
out, and `reference` says what should have come. It withholds work until `collect`, does copies late and out of order
over poisoned destinations, transfers at any later time, and accepts a random number of drafts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.engine.fake_memory import (
    HIDDEN_SIZE,
    POISON,
    Disk,
    Memory,
    Place,
    entry_of,
    full_group,
    hidden_of,
    hidden_vector,
    in_reach,
    next_token,
    reference,
    state_of,
    token_key,
)
from headrace.seam import (
    DEVICE,
    DUMMY_BLOCK,
    FROM_DEVICE,
    HOST_TOKEN,
    LAST_HIDDEN,
    PROMPT_LOGPROBS,
    SAMPLE,
    SUM_HIDDEN,
    EngineFacts,
    GroupSpec,
    PoolSizes,
    RowLogprobs,
    Section,
    SectionResult,
    SlotInit,
    StepPlan,
    StepResult,
    ints,
)
from headrace.types import MediaSpan

__all__ = ["FakeEngine", "reference"]


@dataclass(slots=True)
class Slot:
    init: SlotInit
    states: list[tuple[int, int]]
    """By group: (recurrent state, tokens it has seen); unused for attention groups."""
    tables: list[dict[int, int]]
    """By group: index -> block."""
    media: Sequence[MediaSpan] = ()
    last_token: int = -1
    num_tokens: int = 0
    """Tokens whose KV is in the cache."""
    done: bool = False
    host_chosen: bool = False
    """A beam: the host drops its table without a word."""


@dataclass(slots=True)
class Rank:
    """The state of one section."""

    memory: Memory
    slots: dict[int, Slot] = field(default_factory=dict[int, Slot])


class FakeEngine:
    """Implements `seam.EnginePort`. `seed` drives acceptance, lateness, failures and injected row errors.

    Args:
        groups: layer groups; one of full attention by default.
        lateness: chance that what could be done or reported now waits for a later result.
        failure_rate: chance that a transfer fails.
        disks: by section, what an earlier engine left on disk.
    """

    memory_class = Memory

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        groups: Sequence[GroupSpec] = (),
        num_sections: int = 1,
        tokens_per_block: int = 4,
        seed: int = 0,
        error_rate: float = 0.0,
        failure_rate: float = 0.0,
        lateness: float = 0.6,
        max_position: int = 4096,
        free_bytes: int = 1 << 30,
        disks: Sequence[Disk] = (),
    ) -> None:
        self.facts = EngineFacts(
            model_type="fake",
            vocab_size=vocab_size,
            num_valid_ids=vocab_size,
            max_position=max_position,
            groups=tuple(groups) or (full_group(),),
            weight_bytes=0,
            activation_bytes=0,
            free_bytes=free_bytes,
            device="none",
            num_sections=num_sections,
            hidden_size=HIDDEN_SIZE,
            fingerprint="fake",
        )
        self.groups = self.facts.groups
        self.vocab_size = vocab_size
        self.tokens_per_block = tokens_per_block
        self.error_rate = error_rate
        self.failure_rate = failure_rate
        self.lateness = lateness
        self.disks = list(disks) or [Disk() for _ in range(num_sections)]
        self.media: dict[int, Sequence[MediaSpan]] = {}
        """By request id, what an encoder would have made of its prompt."""
        self.ranks: list[Rank] = []
        self._random = random.Random(seed)
        self._queue: deque[tuple[StepPlan, list[dict[Place, int]]]] = deque()

    def open(self) -> EngineFacts:
        return self.facts

    def allocate(self, sizes: PoolSizes) -> None:
        self.ranks = [
            Rank(self.memory_class(self.groups, sizes, disk, tokens_per_block=self.tokens_per_block))
            for disk in self.disks
        ]

    def submit(self, plan: StepPlan) -> None:
        busy = [
            rank.memory.promise(section.copies, section.transfers)
            for rank, section in zip(self.ranks, plan.sections, strict=True)
        ]
        self._queue.append((plan, busy))

    def collect(self) -> StepResult:
        plan, busy = self._queue.popleft()
        done: list[int] = []
        failed: list[int] = []
        results: list[SectionResult] = []
        for rank, section, places in zip(self.ranks, plan.sections, busy, strict=True):
            rank.memory.busy = places
            results.append(self._run(rank, section))
            more = rank.memory.advance(self._random, lateness=self.lateness, failure_rate=self.failure_rate)
            done += more[0]
            failed += more[1]
        return StepResult(
            plan.step,
            tuple(results),
            finished_copies=ints(done),
            failed_copies=ints(failed),
            finished_commands={command.id: {"error": ""} for command in plan.commands},
            forward_s=plan.step % 7 / 7,
        )

    def close(self) -> None:
        self._queue.clear()

    # ---- one section -------------------------------------------------------------------------

    def _run(self, rank: Rank, section: Section) -> SectionResult:
        for slot in section.freed_slots.tolist():
            rank.slots.pop(slot, None)
        for init in section.inits:
            tables: list[dict[int, int]] = [{} for _ in self.groups]
            media = self.media.get(init.request_id, ())
            rank.slots[init.slot] = Slot(init, [(0, 0)] * len(self.groups), tables, media)
        for group, triples in enumerate(section.blocks):
            for slot, index, block in triples.tolist():
                rank.slots[slot].tables[group][index] = block
        rank.memory.begin(section.copies, section.transfers)
        for group, block, slot in section.restores.tolist():
            self.restore(rank, rank.slots[slot], group, block)
        result = self._rows(rank, section)
        for group, slot, block in section.saves.tolist():
            self._use(rank, [(DEVICE, group, block)], write=True)
            rank.memory.tiers[DEVICE][group][block] = np.asarray(rank.slots[slot].states[group], np.uint64)
        return result

    def restore(self, rank: Rank, slot: Slot, group: int, block: int) -> None:
        assert self.groups[group].is_recurrent and not slot.num_tokens, "only a new slot's state is restored"
        self._use(rank, [(DEVICE, group, block)], write=False)
        state, num_tokens = rank.memory.tiers[DEVICE][group][block].tolist()
        slot.states[group] = state, num_tokens

    def _use(self, rank: Rank, places: Sequence[Place], *, write: bool) -> None:
        """Someone is about to read or write: what is ordered before happens now."""
        memory = rank.memory
        for place in places:
            assert place[2] != DUMMY_BLOCK, f"group {place[1]}: the dummy block is used"
            memory.check_free(place, write=write)
            if write:
                memory.before_write(place)
            else:
                memory.before_read(place)

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
            if int(section.flags[row]) & (LAST_HIDDEN | SUM_HIDDEN) and not slot.done:
                result.hidden[row] = self._pooled(rank, slot, section, row, ids)
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
        return SectionResult(
            ints(accepted), ints(tokens), result.logprobs, result.prompt_logprobs, {}, result.errors, result.hidden
        )

    def _pooled(self, rank: Rank, slot: Slot, section: Section, row: int, ids: list[int]) -> NDArray[np.float32]:
        start = int(section.start[row])
        each = [hidden_vector(self.compute(rank, slot, [token], start + at)) for at, token in enumerate(ids)]
        wanted = each if int(section.flags[row]) & SUM_HIDDEN else each[-1:]
        return np.asarray(np.sum(wanted, axis=0), np.float32)

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
        if slot.done:
            return []
        if start == FROM_DEVICE:
            ids, start = [slot.last_token], slot.num_tokens
        hidden = self.compute(rank, slot, ids, start)
        if not flags & SAMPLE:
            return []
        new = [self._choose(slot, hidden)]
        if flags & HOST_TOKEN:
            slot.host_chosen = True
            return new
        self._take(slot, new[0])
        accept = self._random.randint(0, drafts)
        for at in range(drafts):
            if at >= accept or slot.done:
                # A rejected draft leaves its KV behind, past what counts.
                limit = min(slot.num_tokens + drafts - at, slot.init.max_len)
                self._write(rank, slot, slot.num_tokens, [[POISON] * (limit - slot.num_tokens)] * len(self.groups))
                break
            hidden = self.compute(rank, slot, [new[-1]], slot.num_tokens)
            new.append(self._choose(slot, hidden))
            self._take(slot, new[-1])
        return new

    def _take(self, slot: Slot, token: int) -> None:
        init = slot.init
        slot.last_token = token
        length = slot.num_tokens + 1
        slot.done = (token in init.stop_ids and length > init.min_len) or length >= init.max_len

    def _choose(self, slot: Slot, hidden: int) -> int:
        token = next_token(hidden, self.vocab_size)
        init = slot.init
        if slot.num_tokens + 1 <= init.min_len:
            while token in init.stop_ids:
                token = (token + 1) % self.vocab_size
        return token

    # ---- the made-up model over blocks -------------------------------------------------------

    def compute(self, rank: Rank, slot: Slot, ids: Sequence[int], start: int) -> int:
        """Writes the entries of `ids` from position `start` -> the last one's `hidden`."""
        groups = self.groups
        reads = [self._gather(rank, slot, group, start) for group in range(len(groups))]
        written: list[list[int]] = [[] for _ in groups]
        hidden = 0
        for position, token in enumerate(ids, start):
            key = token_key(token, position, slot.init.sampling.seed, slot.media)
            hidden = hidden_of(key, [each.total for each in reads])
            for group, each in enumerate(reads):
                if each.spec.is_recurrent:
                    each.total = state_of(hidden, group, each.total)
                else:
                    entry = entry_of(hidden, group)
                    written[group].append(entry)
                    each.add(position, entry)
        self._write(rank, slot, start, written)
        slot.num_tokens = start + len(ids)
        for group, each in enumerate(reads):
            if each.spec.is_recurrent:
                slot.states[group] = each.total, slot.num_tokens
        return hidden

    def _gather(self, rank: Rank, slot: Slot, group: int, position: int) -> Reads:
        """What the query at `position` reads."""
        spec = self.groups[group]
        if spec.is_recurrent:
            state, seen = slot.states[group]
            assert seen == position, f"slot {slot.init.slot}: a state after {seen} tokens is read at {position}"
            return Reads(spec, state, {})
        size, table = self.tokens_per_block, slot.tables[group]
        if spec.window is None:
            indices = list(range(-(-position // size)))
        else:
            indices = list(dict.fromkeys(at // size for at in in_reach(spec, position)))
        blocks = [table.get(index, DUMMY_BLOCK) for index in indices]
        self._use(rank, [(DEVICE, group, block) for block in blocks], write=False)
        entries = rank.memory.tiers[DEVICE][group][blocks]
        if spec.window is None:
            return Reads(spec, int(entries.reshape(-1)[:position].sum()), {})
        rows = dict(zip(indices, entries.tolist()))
        values = {at: rows[at // size][at % size] for at in in_reach(spec, position)}
        return Reads(spec, sum(values.values()), values)

    def _write(self, rank: Rank, slot: Slot, start: int, values: Sequence[Sequence[int]]) -> None:
        """`values`: entries from position `start` on, by group; unused for recurrent groups."""
        size = self.tokens_per_block
        for group, entries in enumerate(values):
            if self.groups[group].is_recurrent or not entries:
                continue
            pool, table = rank.memory.tiers[DEVICE][group], slot.tables[group]
            for index in range(start // size, (start + len(entries) - 1) // size + 1):
                block = table.get(index, DUMMY_BLOCK)
                self._use(rank, [(DEVICE, group, block)], write=True)
                self._check_alone(rank, slot, group, index, block)
                first, end = max(start, index * size), min(start + len(entries), (index + 1) * size)
                part = np.asarray(entries[first - start : end - start], np.uint64)
                pool[block, first - index * size : end - index * size] = part

    def _check_alone(self, rank: Rank, slot: Slot, group: int, index: int, block: int) -> None:
        """Nobody else reads a block that is being written. Sharers have it at the same index."""
        for other in rank.slots.values():
            if other is slot or other.done or other.host_chosen:
                continue
            if other.tables[group].get(index) == block:
                reach = {at // self.tokens_per_block for at in in_reach(self.groups[group], other.num_tokens)}
                number, holder = slot.init.slot, other.init.slot
                assert index not in reach, f"group {group}: slot {number} writes block {block} of slot {holder}"


class Reads:
    """The running sum of what a group's next query reads, or the running state of a recurrent group."""

    def __init__(self, spec: GroupSpec, total: int, values: dict[int, int]) -> None:
        """values: by position, the entries that a window group may soon lose from reach."""
        self.spec = spec
        self.total = total
        self.values = values

    def add(self, position: int, entry: int) -> None:
        self.total += entry
        window = self.spec.window
        if window is None:
            return
        self.values[position] = entry
        gone = position + 1 - window
        if gone >= self.spec.sink_tokens:
            self.total -= self.values.pop(gone)
