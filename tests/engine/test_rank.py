"""A rank's steps: blocks that were away and came back, and faults that fail what they must."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.batch import leave_out, put_back
from headrace.engine.rank import Rank
from headrace.seam import DEVICE, DISK, HOST, RowLogprobs, Section, SectionResult, int_rows, ints
from headrace.types import Sampling
from tests.engine.driver import BLOCK, NUM_BLOCKS, Driver, open_rank, straight
from tests.twin.harness import VOCAB, tiny_gemma3, tiny_llama

COUNT = 12


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {at}").randrange(VOCAB) for at in range(length)]


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rank(folder: Path) -> Iterator[Rank]:
    opened = open_rank(folder)
    yield opened
    opened.close()


def tiers(folder: Path, rank: Rank) -> dict[str, Any]:
    blocks = (NUM_BLOCKS,) * len(rank.groups)
    return {"host_blocks": blocks, "disk_blocks": blocks, "disk_folder": str(folder)}


def transfer(driver: Driver, rows: list[tuple[int, ...]]) -> None:
    """Empty plans until these transfers have ended well."""
    result = driver.step({}, transfers=int_rows(rows, 7))
    left = {row[0] for row in rows}
    deadline_s = time.monotonic() + 20
    while left := left - set(result.finished_copies.tolist()):
        assert not len(result.failed_copies) and time.monotonic() < deadline_s
        result = driver.step({})
    assert not len(result.failed_copies)


def poison(driver: Driver) -> None:
    for layer in range(driver.rank.memory.pools.num_layers):
        cache = driver.rank.memory.pools.layer(layer)
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))


@pytest.mark.parametrize("through_disk", [False, True])
def test_offloaded_and_resumed_equals_straight(rank: Rank, tmp_path: Path, through_disk: bool) -> None:
    """Another slot, other blocks, the resumed row in the plan that brings its blocks back."""
    driver, ids = Driver(rank, **tiers(tmp_path, rank)), prompt(2 * BLOCK + 3)
    expected = straight(driver, ids, COUNT)
    driver.begin(1)
    tokens = [int(driver.rows({1: ids}).tokens[0]), *driver.generate(1, 4)]
    tables = driver.tables[1]
    down = [
        (10 * group + at, group, DEVICE, block, HOST, 30 - at)
        for group, table in enumerate(tables)
        for at, block in enumerate(table)
    ]
    away = driver.step({}, copies=int_rows(down, 6), freed_slots=ints([1]))
    assert sorted(away.finished_copies.tolist()) == sorted(row[0] for row in down)
    length = driver.lengths[1]
    for free in driver.free:
        free.append(free.pop(0))  # so that it comes back to other blocks
    poison(driver)
    if through_disk:
        held = [(group, host, 1 + copy_id % 10) for copy_id, group, _, _, _, host in down]
        transfer(driver, [(100 + i, group, HOST, host, DISK, disk, i) for i, (group, host, disk) in enumerate(held)])
        for array in rank.memory.host.arrays:
            array[:] = 255
        transfer(driver, [(200 + i, group, DISK, disk, HOST, host, i) for i, (group, host, disk) in enumerate(held)])
    driver.begin(2, length=length)
    up = [
        (300 + 10 * group + at, group, HOST, 30 - at, DEVICE, block)
        for group, table in enumerate(driver.tables[2])
        for at, block in enumerate(table)
    ]
    assert driver.tables[2] != tables
    resumed = driver.rows({2: [tokens[-1]]}, copies=int_rows(up, 6))
    assert [*tokens, int(resumed.tokens[0]), *driver.generate(2, COUNT - 6)] == expected


def test_a_fork_copies_its_last_block(rank: Rank) -> None:
    """Copies on the device, in the plan of the first row that writes to them."""
    driver, ids = Driver(rank), prompt(BLOCK + 2)
    expected = straight(driver, ids, COUNT)
    driver.begin(1)
    first = int(driver.rows({1: ids}).tokens[0])
    driver.begin(2, length=len(ids))
    copies = [
        (10 * group + at, group, DEVICE, source, DEVICE, destination)
        for group, (mine, theirs) in enumerate(zip(driver.tables[1], driver.tables[2]))
        for at, (source, destination) in enumerate(zip(mine, theirs))
    ]
    both = driver.rows({1: [first], 2: [first]}, copies=int_rows(copies, 6)).tokens.tolist()
    tokens = [both, *(driver.rows({1: None, 2: None}).tokens.tolist() for _ in range(COUNT - 2))]
    assert [pair[0] for pair in tokens] == [pair[1] for pair in tokens] == expected[1:]


def test_kept_logits_are_raw(rank: Rank) -> None:
    """What sampling does to them afterwards is not seen, and nobody else's are kept."""
    driver, ids = Driver(rank), prompt(7)
    banned = Sampling(return_logits=True, logit_bias={5: -100.0, 6: 100.0})
    driver.begin(1, sampling=Sampling(return_logits=True))
    driver.begin(2, sampling=banned)
    driver.begin(3)
    got = driver.rows({1: ids, 2: ids, 3: ids})
    assert sorted(got.logits) == [0, 1] and int(got.tokens[1]) == 6
    torch.testing.assert_close(got.logits[1], got.logits[0], atol=0, rtol=0)


def test_a_slot_that_cannot_begin_fails_alone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, ids = Driver(rank), prompt(7)
    expected = straight(driver, ids, 4)
    begin = rank.sampler.begin

    def refuses(init: Any) -> None:
        if init.request_id == 7:
            raise MemoryError("no row for its counts")
        begin(init)

    monkeypatch.setattr(rank.sampler, "begin", refuses)
    driver.begin(1)
    driver.begin(2, request_id=7)
    driver.begin(3)
    got = driver.rows({1: ids[:3], 2: prompt(9), 3: ids})
    assert got.errors == {1: "MemoryError: no row for its counts"} and got.num_accepted.tolist() == [1, 0, 1]
    assert got.tokens[1] == expected[0]
    again = driver.rows({1: ids[3:], 3: None, 2: None})  # a plan that was made before the fault was known
    assert again.errors == {2: "MemoryError: no row for its counts"}
    assert again.tokens.tolist() == expected[:2]
    alone = driver.rows({2: None})
    assert list(alone.errors) == [0] and alone.num_accepted.tolist() == [0] and not len(alone.tokens)
    driver.give_back(2)
    driver.begin(2)
    assert int(driver.rows({2: ids}, freed_slots=ints([2])).tokens[0]) == expected[0]


def test_a_step_that_fails_fails_its_rows_only(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, ids = Driver(rank, host_blocks=(NUM_BLOCKS,) * len(rank.groups)), prompt(6)
    expected = straight(driver, ids, 5)
    driver.begin(1)
    tokens = [int(driver.rows({1: ids}).tokens[0])]
    forward = rank.runner.forward

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no memory for activations")

    monkeypatch.setattr(rank.runner, "forward", broken)
    driver.begin(2)
    copy = [(5, 0, DEVICE, 39, HOST, 3)]
    result = driver.step({2: ids}, copies=int_rows(copy, 6))
    assert result.sections[0].errors == {0: "RuntimeError: no memory for activations"}
    assert result.finished_copies.tolist() == [5]
    monkeypatch.setattr(rank.runner, "forward", forward)
    assert not len(driver.rows({2: None}).tokens)
    assert [*tokens, *driver.generate(1, 4)] == expected


def test_a_half_applied_plan_is_fatal(rank: Rank) -> None:
    driver = Driver(rank)
    driver.begin(1)
    with pytest.raises(RuntimeError, match=r"^step 1: block tables or copies were applied in part, .*IndexError"):
        driver.rows({1: prompt(3)}, copies=int_rows([(1, 0, DEVICE, 1, DEVICE, 10_000)], 6))


def test_facts_name_the_model_and_the_rate(rank: Rank, folder: Path) -> None:
    assert rank.facts.copy_bytes_per_s > 1e6
    again = open_rank(folder)
    other = open_rank(folder, kv_cache_config={"tokens_per_block": 2 * BLOCK})
    assert rank.facts.fingerprint == again.facts.fingerprint != other.facts.fingerprint
    again.close()
    other.close()


# ---- rows that are left out ----------------------------------------------------------------------


def section() -> Section:
    return Section(
        slot=ints([5, 6, 7, 8]),
        num_tokens=ints([2, 3, 1, 1]),
        start=ints([0, 4, -1, -1]),
        num_drafts=ints([0, 0, 1, 2]),
        tree=ints([0, 0, 3, 4]),
        flags=ints([0, 1, 1, 1]),
        num_context_rows=2,
        ids=ints([10, 11, 12, 13, 14]),
        next_ids=ints([12, -1]),
    )


def test_rows_left_out_take_their_tokens_along() -> None:
    whole = section()
    assert leave_out(whole, {}) is whole
    part = leave_out(section(), {0: "", 3: ""})
    assert part.slot.tolist() == [6, 7] and part.num_tokens.tolist() == [3, 1] and part.start.tolist() == [4, -1]
    assert part.ids.tolist() == [12, 13, 14] and part.next_ids.tolist() == [-1] and part.num_context_rows == 1
    assert part.num_drafts.tolist() == [0, 1] and part.tree.tolist() == [0, 3] and part.flags.tolist() == [1, 1]
    assert leave_out(section(), range(4)).num_rows == 0


def test_results_go_back_to_their_rows() -> None:
    one = RowLogprobs(ints([[1]]), np.zeros((1, 1), np.float32), ints([1]))
    result = SectionResult(ints([1, 2]), ints([4, 5, 6]), {0: one}, {1: one}, {0: "logits"}, {1: "bad"})
    whole = put_back(result, {0: "no", 3: "nor this"})
    assert whole.num_accepted.tolist() == [0, 1, 2, 0] and whole.tokens.tolist() == [4, 5, 6]
    assert (list(whole.logprobs), list(whole.prompt_logprobs), whole.logits) == ([1], [2], {1: "logits"})
    assert whole.errors == {2: "bad", 0: "no", 3: "nor this"}
    assert put_back(result, {}) is result
