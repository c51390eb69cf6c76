"""Planted faults: each must end a simulation that runs clean without it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.fake import FakeEngine
from headrace.kvcache.radix import NONE
from headrace.kvcache.tiers import Move
from headrace.types import Request
from tests.sim.faults import AcceptsAnyStamp, CopiesAfterWriters, LosesCopies, RestoresAnother, SwappedRows
from tests.sim.setup import GROUPS, Setup, setup
from tests.sim.traffic import ask_in_turn, prefixes, run_rich
from tests.sim.world import World, replace_request

NUM_WORLDS = 6
"""A fault must show in one of so many."""


def tiered(tmp_path: Path, *, groups: str = "full", **changes: Any) -> Setup:
    cache = {"snapshot_interval": 8, "num_prefetch": 2, "offload_min_priority": 0, **changes.pop("cache", {})}
    fields: dict[str, Any] = {"num_blocks": 20, "host_blocks": 12, "disk_blocks": 30, "lateness": 0.5, **changes}
    tmp_path.mkdir(exist_ok=True, parents=True)
    return setup(
        groups=GROUPS[groups], disk_folder=str(tmp_path), capacity_policy="MAX_UTILIZATION", cache=cache, **fields
    )


def world_of(tmp_path: Path, seed: int, engine: type[FakeEngine] = FakeEngine, **changes: Any) -> World:
    return World(tiered(tmp_path / str(seed), **changes), seed=seed, engine_class=engine)


def go(world: World) -> None:
    run_rich(world, num_steps=200, restart_every=60)


@pytest.mark.parametrize("groups", ["full", "recurrent"])
def test_clean(groups: str, tmp_path: Path) -> None:
    for seed in range(2):
        go(world_of(tmp_path, seed, groups=groups))


@pytest.mark.parametrize(
    ("fault", "groups"),
    [
        (SwappedRows, "full"),
        (LosesCopies, "full"),
        (CopiesAfterWriters, "full"),
        (RestoresAnother, "recurrent"),
    ],
)
def test_catches_a_faulty_engine(fault: type[FakeEngine], groups: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"instead of|a state after"):
        for seed in range(NUM_WORLDS):
            go(world_of(tmp_path, seed, fault, groups=groups))


def families(tmp_path: Path, engine: type[FakeEngine], *, lose_index: bool, groups: str = "full") -> World:
    """Prompts of ten families in turn, too many for device and host; then the process dies, and they come again.

    lose_index: what the disk's index learned in the second half is lost, so it names blocks that were written again.
    """
    tmp_path.mkdir(exist_ok=True)
    world = World(
        tiered(tmp_path, groups=groups, num_blocks=14, host_blocks=10, disk_blocks=44, lateness=0.2),
        engine_class=engine,
    )
    first, second = prefixes(world, 10), prefixes(world, 10)

    def index() -> Path:
        (path,) = tmp_path.glob("*.index")
        return path

    ask_in_turn(world, first, rounds=2)
    old = index().read_bytes()
    if lose_index:
        ask_in_turn(world, second, rounds=2)
    world.harms = ["none"]
    if lose_index:
        index().write_bytes(old)
    world.restart()
    world.seen.clear()
    ask_in_turn(world, first, rounds=2)
    world.verify()
    return world


@pytest.mark.parametrize("groups", ["full", "full and window", "recurrent"])
def test_prefixes_survive_on_disk(groups: str, tmp_path: Path) -> None:
    world = families(tmp_path, FakeEngine, lose_index=False, groups=groups)
    assert world.seen["cached tokens"] >= 16 * 4
    assert world.moves["transfer disk to host"] > 0


def test_catches_a_stamp_that_is_not_checked(tmp_path: Path) -> None:
    world = families(tmp_path / "sound", FakeEngine, lose_index=True)
    assert world.seen["failed transfers"] > 0
    with pytest.raises(AssertionError, match="instead of"):
        families(tmp_path / "faulty", AcceptsAnyStamp, lose_index=True)


def test_catches_a_dropped_salt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        for seed in range(NUM_WORLDS):
            world = world_of(tmp_path, seed)
            cache = world.caches[0]
            claim_of = cache.claim_of

            def without_salt(request: Request, claim_of: Any = claim_of) -> object:
                return claim_of(replace_request(request, cache_salt=""))

            monkeypatch.setattr(cache, "claim_of", without_salt)
            run_rich(world, num_steps=200)


def test_catches_a_block_freed_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = world_of(tmp_path, 0)
    cache = world.caches[0]
    extend_each, calls = cache.extend_each, itertools.count()

    def faulty(wants: list[tuple[int, int, int]]) -> set[int]:
        for owner, _, _ in wants:
            if next(calls) % 20 == 19 and cache.table(owner):
                cache.pools[0].unlease(cache.table(owner)[0])
        return extend_each(wants)

    monkeypatch.setattr(cache, "extend_each", faulty)
    with pytest.raises(AssertionError):
        run_rich(world, num_steps=200)


def test_catches_a_host_block_reused_before_its_copy_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"has not filled|not reported|while transfer"):
        for seed in range(NUM_WORLDS):
            world = world_of(tmp_path, seed, lateness=0.8)
            tiers, store = world.caches[0].tiers, world.caches[0].store
            copy = tiers._copy

            def unleased(move: Move, *rest: int, copy: Any = copy, tiers: Any = tiers, store: Any = store) -> None:
                if move.target >= store.num_groups:  # down to the host
                    copy(Move(NONE, move.source_block, NONE, move.target_block, NONE), *rest)
                    store.unlease(move.target, move.target_block)
                else:
                    copy(move, *rest)

            monkeypatch.setattr(tiers, "_copy", unleased)
            run_rich(world, num_steps=200)
