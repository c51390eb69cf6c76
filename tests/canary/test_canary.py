"""No foreign word in any answer, whatever the pools, aborts, salts and tiers do; and the test sees planted faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.runtime.core import Core
from headrace.seam import DEVICE, DISK, HOST, Ints, int_rows
from tests.canary.model import NUM_SEATS, VOCAB, build
from tests.canary.traffic import Case, Traffic, make_cases
from tests.sim.world import replace_request
from tests.twin.harness import BLOCK, open_runtime

BLOCK_BYTES = 2 * VOCAB * 4 * BLOCK
"""Keys and values of one layer in float32."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("canary"))


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    core = open_runtime(folder, disable_overlap_scheduler=True, kv_cache_config={"enable_block_reuse": False})
    try:
        return make_cases(core, per_seat=2)
    finally:
        core.engine.close()


@pytest.fixture
def opened() -> Iterator[list[Core]]:
    cores: list[Core] = []
    yield cores
    for core in cores:
        core.engine.close()


def open_tiny(folder: Path, disk: Path, **changes: Any) -> Core:
    """Device blocks for a quarter of the seats, about as many on the host, twice as many on disk."""
    kv = {
        "max_tokens": 70 * BLOCK,
        "host_cache_size": 80 * BLOCK_BYTES,
        "disk_cache_size": 160 * BLOCK_BYTES,
        "disk_cache_path": str(disk),
        "secondary_offload_min_priority": 20,
    }
    fields: dict[str, Any] = {
        "max_batch_size": 24,
        "max_num_tokens": 96,
        "max_seq_len": 64,
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    }
    return open_runtime(folder, kv_cache_config=kv, **{**fields, **changes})


def check(traffic: Traffic, num_answers: int) -> None:
    """Runs, and sees that what could have gone wrong was there."""
    traffic.run(num_answers)
    seen = traffic.seen
    assert seen["answered"] + seen["aborted"] == traffic.num_answers >= num_answers
    assert seen["aborted"] > num_answers // 100
    assert seen["cached tokens"] > num_answers
    for way in ((DEVICE, HOST), (HOST, DEVICE), (HOST, DISK), (DISK, HOST), (DEVICE, DEVICE)):
        assert traffic.moves[way] > 0, f"no block went from tier {way[0]} to {way[1]}"


def test_no_foreign_words(folder: Path, cases: list[Case], opened: list[Core], tmp_path: Path) -> None:
    opened.append(open_tiny(folder, tmp_path))
    check(Traffic(opened[0], cases), 400)


# ---- faults that the canaries must tell ----------------------------------------------------------


def drop_salt(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = core.scheduler.sections[0].kv
    claim_of = cache.claim_of
    monkeypatch.setattr(cache, "claim_of", lambda asked: claim_of(replace_request(asked, cache_salt="")))


def delay_copies(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go out with the plan after the one whose rows count on them."""
    tiers = core.scheduler.sections[0].kv.tiers
    take, late = tiers.take_copies, [int_rows((), 6)]

    def take_late() -> Ints:
        late.append(take())
        return late.pop(0)

    monkeypatch.setattr(tiers, "take_copies", take_late)


def free_early(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a request gets a block that another one still writes and reads."""
    section = core.scheduler.sections[0]
    take_blocks, calls = section.changes.take_blocks, itertools.count()

    def faulty() -> tuple[Ints, ...]:
        told = take_blocks()
        tables = [section.kv.table(owner) for owner in section.kv.tables]
        taken = [table[-1] for table in tables if table and section.kv.pools[0].node[table[-1]] < 0]
        for triple in told[0]:
            if triple[2] and taken and next(calls) % 10 == 9:
                triple[2] = taken[0]
        return told

    monkeypatch.setattr(section.changes, "take_blocks", faulty)


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (drop_salt, "of another salt's"),
        (delay_copies, "foreign words|instead of"),
        (free_early, "foreign words|instead of"),
    ],
)
def test_a_planted_fault_is_told(
    folder: Path,
    cases: list[Case],
    opened: list[Core],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Core, pytest.MonkeyPatch], None],
    told: str,
) -> None:
    opened.append(open_tiny(folder, tmp_path))
    plant(opened[0], monkeypatch)
    with pytest.raises(AssertionError, match=told):
        Traffic(opened[0], cases).run(2000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_answers(folder: Path, opened: list[Core], tmp_path: Path) -> None:
    solo = open_runtime(folder, disable_overlap_scheduler=True, kv_cache_config={"enable_block_reuse": False})
    opened.append(solo)
    many = make_cases(solo, per_seat=12, seed=1)
    assert len(many) == 12 * NUM_SEATS
    opened.append(open_tiny(folder, tmp_path))
    check(Traffic(opened[1], many, seed=2), 10_000)
