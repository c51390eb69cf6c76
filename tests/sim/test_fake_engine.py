"""The fake engine on hand-made plans: it keeps the seam's promises, and holds the control half to its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.engine.fake import FakeEngine
from headrace.engine.fake_memory import Disk, full_group, recurrent_group, reference, window_group
from headrace.seam import (
    DEVICE,
    DISK,
    FROM_DEVICE,
    HOST,
    SAMPLE,
    GroupSpec,
    PoolSizes,
    Section,
    SlotInit,
    StepPlan,
    StepResult,
    int_rows,
    ints,
)
from headrace.types import MediaSpan, Sampling

VOCAB = 50
MIXED = (full_group(), window_group(6, sink_tokens=2), recurrent_group())
PROMPT = [7, 1, 4, 4, 9, 30, 2, 8, 8, 11, 0, 49, 5]


class Hand:
    """Makes plans one at a time; blocks of four tokens."""

    def __init__(self, groups: Sequence[GroupSpec] = (full_group(),), **changes: Any) -> None:
        self.engine = FakeEngine(vocab_size=VOCAB, groups=groups, **changes)
        count = len(groups)
        self.engine.allocate(PoolSizes((20,) * count, 8, (10,) * count, (10,) * count))
        self.step = 0
        self.done: list[int] = []
        self.failed: list[int] = []

    def submit(self, *, blocks: Sequence[Sequence[tuple[int, int, int]]] = (), **fields: Any) -> None:
        self.step += 1
        widths = {"copies": 6, "transfers": 7, "restores": 3, "saves": 3}
        for name, width in widths.items():
            fields[name] = int_rows(fields.pop(name, ()), width)
        tables = tuple(int_rows(list(triples), 3) for triples in blocks)
        self.engine.submit(StepPlan(self.step, (Section(blocks=tables, **fields),)))

    def collect(self) -> StepResult:
        result = self.engine.collect()
        self.done += result.finished_copies.tolist()
        self.failed += result.failed_copies.tolist()
        return result

    def run(self, **fields: Any) -> list[int]:
        self.submit(**fields)
        return self.collect().sections[0].tokens.tolist()

    def prompt(
        self, slot: int, ids: Sequence[int], *, start: int = 0, samples: bool = True, **fields: Any
    ) -> list[int]:
        flags = SAMPLE if samples else 0
        row = {"slot": [slot], "num_tokens": [len(ids)], "start": [start], "num_drafts": [0], "flags": [flags]}
        arrays: dict[str, Any] = {name: ints(values) for name, values in row.items()}
        return self.run(num_context_rows=1, ids=ints(ids), next_ids=ints([-1]), **arrays, **fields)

    def generate(self, slot: int, **fields: Any) -> list[int]:
        row = {"slot": [slot], "num_tokens": [1], "start": [FROM_DEVICE], "num_drafts": [0], "flags": [SAMPLE]}
        return self.run(**{name: ints(values) for name, values in row.items()}, **fields)

    def until_done(self, *ids: int) -> None:
        for _ in range(200):
            if set(ids) <= set(self.done):
                return
            self.run()
        raise AssertionError(f"{ids} were never reported, only {self.done}")


def init(slot: int, request_id: int = 1, *, seed: int = 0, length: int = len(PROMPT)) -> SlotInit:
    return SlotInit(slot, request_id, Sampling(seed=seed), length, 0, 100, ())


def tables(slot: int, blocks: Sequence[int], groups: int = 1) -> list[list[tuple[int, int, int]]]:
    return [[(slot, index, block) for index, block in enumerate(blocks)] for _ in range(groups)]


def expected(count: int, groups: Sequence[GroupSpec] = (full_group(),), *, prompt: Sequence[int] = PROMPT) -> list[int]:
    return reference(prompt, count, vocab_size=VOCAB, groups=groups)


@pytest.mark.parametrize("chunk", [1, 3, 4, 13])
def test_every_group_reads_what_its_queries_reach(chunk: int) -> None:
    hand = Hand(MIXED)
    got: list[int] = []
    for start in range(0, len(PROMPT), chunk):
        new = {"inits": (init(0),), "blocks": tables(0, [3, 5, 4, 9, 8, 7], 3)} if not start else {}
        last = start + chunk >= len(PROMPT)
        got += hand.prompt(0, PROMPT[start : start + chunk], start=start, samples=last, **new)
    for _ in range(6):
        got += hand.generate(0)
    assert got == expected(7, MIXED)
    assert got != expected(7, (full_group(), window_group(7, sink_tokens=2), recurrent_group()))


def test_what_no_query_reaches_does_not_matter() -> None:
    hand = Hand(MIXED)
    got = hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [3, 5, 4, 9, 8, 7], 3))
    # The window of 6 at position 13 begins at 8; the two sinks are in block 3: block 5 is somebody else's now.
    hand.engine.ranks[0].memory.tiers[DEVICE][1][5] = 1
    got += hand.generate(0)
    assert got == expected(2, MIXED)
    hand.engine.ranks[0].memory.tiers[DEVICE][1][3] = 1
    assert hand.generate(0) != expected(3, MIXED)[2:]


def test_tokens_depend_on_everything_before_them() -> None:
    """A block with the right tokens after a foreign prefix isn't good enough."""
    hand = Hand()
    hand.prompt(0, [1, 2, 3, 4, *PROMPT[4:]], inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    hand.prompt(1, PROMPT, inits=(init(1),), blocks=tables(1, [5, 6, 7, 8]))
    got = hand.prompt(2, PROMPT[8:], start=8, inits=(init(2),), blocks=tables(2, [5, 2, 9, 10]))
    assert got != expected(1)
    assert hand.prompt(3, PROMPT[8:], start=8, inits=(init(3),), blocks=tables(3, [5, 6, 11, 12])) == expected(1)


def test_seed_and_media_change_tokens() -> None:
    answers = [tuple(expected(3))]
    for seed, media in ((0, ()), (1, ()), (0, (MediaSpan(5, 2, b"a" * 16),)), (0, (MediaSpan(5, 2, b"b" * 16),))):
        hand = Hand()
        hand.engine.media[1] = media
        got = hand.prompt(0, PROMPT, inits=(init(0, seed=seed),), blocks=tables(0, [1, 2, 3, 4]))
        answers.append((*got, *hand.generate(0), *hand.generate(0)))
    assert answers[0] == answers[1] and len(set(answers)) == 4


# ---- copies --------------------------------------------------------------------------------------


def test_a_copy_is_ordered_before_whoever_overwrites_and_whoever_reads() -> None:
    hand = Hand(lateness=1.0)  # nothing happens before it must
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    # Block 2 goes to the host, and in the same plan another sequence gets it.
    hand.prompt(
        1,
        [6] * 8,
        inits=(init(1),),
        blocks=tables(1, [5, 2]),
        freed_slots=ints([0]),
        copies=[(10, 0, DEVICE, 2, HOST, 7)],
    )
    got = hand.prompt(
        2,
        PROMPT[8:],
        start=8,
        inits=(init(2),),
        blocks=tables(2, [1, 6, 7, 8]),
        copies=[(11, 0, HOST, 7, DEVICE, 9), (12, 0, DEVICE, 9, DEVICE, 6)],
    )
    assert got == expected(1)
    assert not hand.done


def test_a_copy_not_done_yet_is_poison() -> None:
    hand = Hand(lateness=1.0)
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    hand.run(copies=[(10, 0, DEVICE, 2, HOST, 7)])
    memory = hand.engine.ranks[0].memory
    assert not (memory.tiers[HOST][0][7] == memory.tiers[DEVICE][0][2]).any()
    memory.before_read((HOST, 0, 7))
    assert (memory.tiers[HOST][0][7] == memory.tiers[DEVICE][0][2]).all()


def test_copies_are_reported_late_and_out_of_order() -> None:
    hand = Hand()
    hand.run(copies=[(id, 0, DEVICE, 1 + id, HOST, 1 + id) for id in range(9)])
    assert len(hand.done) < 9
    hand.until_done(*range(9))
    assert hand.done != sorted(hand.done) and len(hand.done) == 9 and not hand.failed


# ---- transfers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        {"copies": [(2, 0, HOST, 3, DEVICE, 2)]},
        {"copies": [(2, 0, HOST, 7, DEVICE, 9)]},
        {"transfers": [(2, 0, HOST, 7, DISK, 3, 1)]},
        {"transfers": [(2, 0, DEVICE, 3, HOST, 7, 0)]},
        {"restores": [(0, 2, 0)], "groups": (recurrent_group(),), "fine": True},
        {"copies": [(2, 0, DEVICE, 2, HOST, 3)], "fine": True},
    ],
)
@pytest.mark.parametrize("gap", [0, 1])
def test_nobody_uses_the_target_of_a_transfer_or_writes_its_source(use: dict[str, Any], gap: int) -> None:
    use = dict(use)
    hand = Hand(use.pop("groups", (full_group(),)), lateness=1.0)
    fine = use.pop("fine", False)
    hand.submit(transfers=[(1, 0, DEVICE, 2, HOST, 7, 0)], inits=(init(0),))
    for _ in range(gap):
        hand.collect()

    def go_on() -> None:
        hand.submit(**use)
        for _ in range(2 - gap):
            hand.collect()

    if fine:
        go_on()
        return
    with pytest.raises(AssertionError, match="transfer"):
        go_on()


def test_rows_may_read_the_source_of_a_transfer_and_not_write_it() -> None:
    hand = Hand(lateness=1.0)
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    hand.run(transfers=[(1, 0, DEVICE, 2, HOST, 7, 0)])
    assert hand.generate(0) == expected(2)[1:]
    hand.run(transfers=[(2, 0, DEVICE, 4, HOST, 8, 0)])
    with pytest.raises(AssertionError, match="while transfer 2 has it"):
        hand.generate(0)


def test_a_plan_made_before_the_report_has_to_keep_off_too() -> None:
    hand = Hand(lateness=0.0)
    hand.submit(transfers=[(1, 0, DEVICE, 2, HOST, 7, 0)])
    hand.submit(copies=[(2, 0, HOST, 7, DEVICE, 9)])
    hand.collect()
    assert hand.done == [1]
    with pytest.raises(AssertionError, match="while transfer 1 has it"):
        hand.collect()


def test_a_transfer_keeps_off_the_ends_of_copies() -> None:
    hand = Hand(lateness=1.0)
    hand.run(copies=[(1, 0, DEVICE, 2, HOST, 7), (5, 0, DEVICE, 6, HOST, 8)])
    hand.submit(transfers=[(2, 0, DEVICE, 2, HOST, 3, 0)])  # both only read it
    hand.collect()
    with pytest.raises(AssertionError, match="not filled"):
        hand.run(transfers=[(3, 0, HOST, 7, DISK, 3, 1)])
    with pytest.raises(AssertionError, match="a copy that is not reported"):
        hand.submit(transfers=[(4, 0, DEVICE, 5, HOST, 8, 0)])


def test_down_to_disk_and_back() -> None:
    groups = (full_group(), window_group(6, sink_tokens=2))
    hand = Hand(groups)
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4], 2))
    hand.run(freed_slots=ints([0]))
    pairs = [(group, block) for group in range(2) for block in (1, 2, 3)]
    for way, first in (((DEVICE, HOST), 10), ((HOST, DISK), 20), ((DISK, HOST), 30)):
        ids = range(first, first + 6)
        hand.run(transfers=[(id, g, way[0], b, way[1], b, 100 + b) for id, (g, b) in zip(ids, pairs)])
        hand.until_done(*ids)
    for pool in hand.engine.ranks[0].memory.tiers[DEVICE]:
        pool[:] = 1
    copies = [(40 + at, group, HOST, block, DEVICE, 10 + block) for at, (group, block) in enumerate(pairs)]
    got = hand.prompt(1, PROMPT[12:], start=12, inits=(init(1),), blocks=tables(1, [11, 12, 13, 14], 2), copies=copies)
    assert got == expected(1, groups) and not hand.failed


def test_a_failed_transfer_leaves_nothing() -> None:
    hand = Hand(failure_rate=1.0)
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    hand.run(transfers=[(1, 0, DEVICE, 2, HOST, 7, 0)])
    hand.until_done(1)
    memory = hand.engine.ranks[0].memory
    assert hand.failed == [1] and len(set(memory.tiers[HOST][0][7].tolist())) == 1
    assert hand.generate(0) == expected(2)[1:], "the source is as it was"


def on_disk(disk: Disk, *, finish: bool = True) -> np.ndarray[Any, Any]:
    """A block at 3 under the stamp 77; -> its words."""
    hand = Hand(disks=[disk], lateness=0.5 if finish else 1.0)
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    memory = hand.engine.ranks[0].memory
    memory.tiers[HOST][0][5] = memory.tiers[DEVICE][0][2]
    hand.run(transfers=[(1, 0, HOST, 5, DISK, 3, 77)])
    if finish:
        hand.until_done(1)
    return memory.tiers[DEVICE][0][2].copy()


@pytest.mark.parametrize(("finish", "stamp"), [(True, 77), (True, 78), (False, 77)])
def test_the_disk_survives_and_stamps_are_checked(finish: bool, stamp: int) -> None:
    disk = Disk()
    words = on_disk(disk, finish=finish)
    hand = Hand(disks=[disk])
    hand.run(transfers=[(1, 0, DISK, 3, HOST, 6, stamp)])
    hand.until_done(1)
    right = finish and stamp == 77
    assert hand.failed == ([] if right else [1])
    assert (hand.engine.ranks[0].memory.tiers[HOST][0][6] == words).all() == right


def test_another_shape_begins_anew() -> None:
    disk = Disk()
    on_disk(disk)
    hand = Hand((full_group(), full_group(1)), disks=[disk])
    hand.run(transfers=[(1, 0, DISK, 3, HOST, 6, 77)])
    hand.until_done(1)
    assert hand.failed == [1]


# ---- recurrent states ----------------------------------------------------------------------------


def test_snapshots() -> None:
    groups = (full_group(), recurrent_group(1))
    hand = Hand(groups)
    first = {"blocks": tables(0, [1, 2, 3, 4], 2), "inits": (init(0),)}
    hand.prompt(0, PROMPT[:8], samples=False, saves=[(1, 0, 9)], **first)
    assert hand.prompt(0, PROMPT[8:], start=8) == expected(1, groups)
    copies = [(1, 1, DEVICE, 9, HOST, 2), (2, 1, HOST, 2, DEVICE, 8)]
    second = {"blocks": tables(1, [1, 2, 5, 6], 2), "inits": (init(1),)}
    got = hand.prompt(1, PROMPT[8:], start=8, copies=copies, restores=[(1, 8, 1)], **second)
    assert [*got, *hand.generate(1), *hand.generate(1)] == expected(3, groups)


@pytest.mark.parametrize("restores", [(), [(1, 9, 1)]], ids=["none", "of another position"])
def test_a_state_must_be_that_of_the_position(restores: Any) -> None:
    hand = Hand((full_group(), recurrent_group(1)))
    hand.prompt(0, PROMPT[:4], samples=False, saves=[(1, 0, 9)], blocks=tables(0, [1, 2], 2), inits=(init(0),))
    hand.prompt(0, PROMPT[4:8], start=4, samples=False)
    with pytest.raises(AssertionError, match="a state after"):
        hand.prompt(1, PROMPT[8:], start=8, restores=restores, blocks=tables(1, [1, 2, 5, 6], 2), inits=(init(1),))


def test_a_foreign_snapshot_of_the_same_length_changes_tokens() -> None:
    groups = (recurrent_group(0),)
    hand = Hand(groups)
    for slot, ids in enumerate((PROMPT[:8], PROMPT[1:9])):
        hand.prompt(slot, ids, samples=False, saves=[(0, slot, 1 + slot)], inits=(init(slot),))
    got = [
        hand.prompt(2 + at, PROMPT[8:], start=8, restores=[(0, 1 + at, 2 + at)], inits=(init(2 + at),)) for at in (0, 1)
    ]
    assert got[0] == expected(1, groups) != got[1]


# ---- tables --------------------------------------------------------------------------------------


def test_a_shared_block_is_not_written() -> None:
    hand = Hand()
    hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3, 4]))
    with pytest.raises(AssertionError, match="slot 1 writes block 2 of slot 0"):
        hand.prompt(1, PROMPT[4:], start=4, inits=(init(1),), blocks=tables(1, [1, 2, 5, 6]))


def test_a_position_needs_a_block() -> None:
    hand = Hand()
    with pytest.raises(AssertionError, match="dummy"):
        hand.prompt(0, PROMPT, inits=(init(0),), blocks=tables(0, [1, 2, 3]))
