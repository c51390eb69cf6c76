"""The cache's settings through the whole runtime on a real tiny model: reuse, lower tiers, a restart."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.kvcache.manager import KvCache
from headrace.runtime.core import Core
from tests.twin.harness import VOCAB, open_runtime, request, run, tiny_gemma3, tiny_llama, tokens_of

DRAW = random.Random(1)
BASE = [DRAW.randrange(VOCAB) for _ in range(30)]
PROMPTS = [[DRAW.randrange(VOCAB) for _ in range(40)] for _ in range(8)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("cache", "cached"),
    [
        ({}, 21),
        ({"enable_partial_reuse": False}, 20),
        ({"copy_on_partial_reuse": False}, 20),  # the block has others after it, so it can't be taken over
        ({"enable_block_reuse": False}, 0),
        ({"block_reuse_config": {"policy": "per_request"}}, 0),
    ],
)
def test_tokens_reused_of_a_shared_front(llama: Path, cache: dict[str, Any], cached: int) -> None:
    core = open_runtime(llama, kv_cache_config=cache)
    try:
        run(core, [request(1, BASE)])
        assert run(core, [request(2, [*BASE[:21], 5, 6, 7, 8])])[2][-1].cached_tokens == cached
    finally:
        core.close()


def rounds(core: Core, count: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Answers and reused tokens of all prompts, several times."""
    answers: list[list[list[int]]] = []
    cached: list[list[int]] = []
    try:
        for turn in range(count):
            some = [request(100 * turn + i, ids) for i, ids in enumerate(PROMPTS)]
            deltas = run(core, some)
            answers.append([tokens_of(deltas[each.id]) for each in some])
            cached.append([deltas[each.id][-1].cached_tokens for each in some])
        return answers, cached
    finally:
        core.close()


def test_lower_tiers_bring_back_what_the_device_has_no_room_for(llama: Path, tmp_path: Path) -> None:
    wanted, _ = rounds(open_runtime(llama, max_batch_size=4), 2)
    small = {"max_tokens": 160}
    alone, lost = rounds(open_runtime(llama, max_batch_size=4, kv_cache_config=small), 2)
    host = {**small, "host_cache_size": 200_000}
    beside, kept = rounds(open_runtime(llama, max_batch_size=4, kv_cache_config=host), 2)
    assert alone == beside == wanted
    assert sum(lost[1]) < 40 and kept[1] == [39] * len(PROMPTS)
    disk = {**small, "disk_cache_size": 1_000_000, "disk_cache_path": str(tmp_path)}
    below, found = rounds(open_runtime(llama, max_batch_size=4, kv_cache_config=disk), 2)
    assert below == wanted and max(found[1]) >= 32
    again, after = rounds(open_runtime(llama, max_batch_size=4, kv_cache_config=disk), 1)
    assert again == wanted[:1] and max(after[0]) >= 32, "a prefix is found after a restart"


def test_what_is_below_the_offload_priority_is_dropped(llama: Path) -> None:
    cache = {"max_tokens": 160, "host_cache_size": 200_000, "secondary_offload_min_priority": 36}
    _, cached = rounds(open_runtime(llama, max_batch_size=4, kv_cache_config=cache), 2)
    assert sum(cached[1]) < 40


def test_a_start_that_failed_gives_the_disk_back(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = {"disk_cache_size": 1_000_000, "disk_cache_path": str(tmp_path)}

    def too_large(*_: Any, **__: Any) -> KvCache:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("headrace.runtime.core.KvCache", too_large)
        with pytest.raises(MemoryError):
            open_runtime(llama, kv_cache_config=disk)
    core = open_runtime(llama, kv_cache_config=disk)
    try:
        run(core, [request(1, BASE)])
        stats = core.scheduler.sections[0].kv.stats
        assert stats.failed_transfers == 0 and stats.disk_used == (11,), "41 tokens were computed"
    finally:
        core.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def test_two_ranks_with_tiers_equal_one_without(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of prompts that the device has no room for, and one after a restart: from host and disk."""
    folder, disk = make(tmp_path / "model"), tmp_path / "disk"
    disk.mkdir()
    wanted, _ = rounds(open_runtime(folder, max_batch_size=4), 2)
    cache = {
        "max_tokens": 160,
        "host_cache_size": 60_000,
        "disk_cache_size": 1_000_000,
        "disk_cache_path": str(disk),
        "disk_prefetch_num_reqs": 2,
    }
    fields: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "max_batch_size": 4,
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "kv_cache_config": cache,
    }
    core = open_runtime(folder, **fields)
    two, kept = rounds(core, 2)
    stats = core.scheduler.sections[0].kv.stats
    assert two == wanted
    assert stats.offload_bytes and stats.onboard_bytes and stats.disk_write_bytes and not stats.failed_transfers
    assert sum(kept[1]) >= 40
    assert len(list(disk.glob("*-rank1.blocks"))) == len(core.facts.groups)
    again = open_runtime(folder, **fields)
    kv = again.scheduler.sections[0].kv
    fetched: list[int] = []
    fetch = kv.fetch

    def noted(owner: int, *others: Any) -> bool:
        if is_begun := fetch(owner, *others):
            fetched.append(owner)
        return is_begun

    monkeypatch.setattr(kv, "fetch", noted)
    after, found = rounds(again, 1)
    assert after == wanted[:1]
    # When the first life was idle the device had 40 blocks of each group: all 13 of three requests, and those went to
    # disk. A prompt of 40 tokens has nine blocks below its last token. The host has 38 blocks at least, all free: room
    # for three such fetches, and nobody takes from them what they have got.
    assert len(fetched) >= 3 and [found[0][owner] for owner in fetched] == [36] * len(fetched)
    stats = again.scheduler.sections[0].kv.stats
    assert stats.disk_read_bytes and not stats.failed_transfers
    for damaged in disk.glob("*-rank1.blocks"):
        damaged.write_bytes(damaged.read_bytes()[:4096])
    broken = open_runtime(folder, **fields)
    last, _ = rounds(broken, 1)
    assert last == wanted[:1], "a block that one rank has lost is lost on both"
    assert broken.scheduler.sections[0].kv.stats.failed_transfers
