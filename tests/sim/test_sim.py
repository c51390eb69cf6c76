"""Thousands of simulated steps with random traffic: exact tokens, integrity after each commit."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.setup import GROUPS, Setup, draw, setup
from tests.sim.traffic import ask_in_turn, prefixes, run, run_rich, verify_beams
from tests.sim.world import World, beam

POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")
CASES: list[tuple[int, bool, str, int]] = list(itertools.product((0, 1, 3), (True, False), POLICIES, (0, 3)))


@pytest.mark.parametrize(("depth", "chained", "policy", "draft_len"), CASES)
def test_random_traffic(depth: int, chained: bool, policy: str, draft_len: int) -> None:
    seed = CASES.index((depth, chained, policy, draft_len))
    made = setup(
        depth=depth,
        chained=chained,
        capacity_policy=policy,
        draft_len=draft_len,
        groups=GROUPS[list(GROUPS)[seed % 5]],
        num_sections=1 + seed % 3 // 2,
        num_blocks=30 + seed,
    )
    world = World(made, seed=seed)
    run(world, num_steps=45)
    assert world.steps > 30


@pytest.mark.parametrize("chunking", ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"])
@pytest.mark.parametrize("reuse", [True, False])
def test_policies(chunking: str, reuse: bool) -> None:
    made = setup(chunking_policy=chunking, reuse=reuse, queue_by_priority=True, max_num_tokens=13)
    run(World(made, seed=5), num_steps=100)


def test_whole_prompts_with_errors() -> None:
    world = World(setup(chunked_prefill=False, max_num_tokens=120, error_rate=0.01), seed=9)
    run(world, num_steps=200)
    assert any(told.end is not None and told.end.finish == "error" for told in world.told.values())


def test_tiny_pool_preempts_and_stays_exact() -> None:
    world = World(setup(capacity_policy="MAX_UTILIZATION", num_blocks=16), seed=3)
    for _ in range(300):
        if world.random.random() < 0.4 and len(world.scheduler.queue) < 10:
            world.add(world.request(cache_salt="", max_tokens=world.random.randint(10, 40)))
        world.step()
    world.drain()
    world.verify()
    assert world.seen["preempted"] > 10


def test_beams_do_not_depend_on_neighbours() -> None:
    world = World(setup(capacity_policy="MAX_UTILIZATION", num_blocks=26), seed=11)
    for _ in range(4):
        world.add(world.request(beam=beam(3), max_tokens=20, stop_ids=()))
    run(world, num_steps=60)
    assert verify_beams(world) >= 3


# ---- every feature ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_features(seed: int, tmp_path: Path) -> None:
    """Groups, tiers, policies and rates drawn at random; adapters, media, retention, pins, restarts in the traffic."""
    world = World(setup(), seed=seed)
    world = World(draw(world.random, folder=str(tmp_path)), seed=seed)
    run_rich(world, num_steps=100, restart_every=45)


@pytest.mark.parametrize("name", list(GROUPS))
def test_tiers_under_pressure(name: str, tmp_path: Path) -> None:
    """Small pools on three tiers: blocks go down and come back, and what is lost on the way is computed again."""
    made = setup(
        groups=GROUPS[name],
        num_blocks=20,
        host_blocks=12,
        disk_blocks=40,
        disk_folder=str(tmp_path),
        capacity_policy="MAX_UTILIZATION",
        failure_rate=0.15,
        lateness=0.3,
        cache={"snapshot_interval": 8, "branch_snapshots": True, "num_prefetch": 2, "offload_min_priority": 20},
    )
    world = World(made, seed=len(name))
    run_rich(world, num_steps=120, restart_every=70)
    ask_in_turn(world, prefixes(world, 8), rounds=3)
    world.verify()
    for way in ("device to host", "host to device", "host to disk"):
        assert world.moves[f"copy {way}"] + world.moves[f"transfer {way}"] > 0, f"nothing went {way}: {world.moves}"
    assert world.seen["cached tokens"] > 0 and world.seen["failed transfers"] > 0
    if any(spec.is_recurrent for spec in made.groups):
        assert world.moves["restore"] > 0 and world.moves["save"] > 0


def everything(folder: Path, policy: str) -> Setup:
    return setup(
        groups=GROUPS["all"],
        num_blocks=36,
        host_blocks=30,
        disk_blocks=80,
        disk_folder=str(folder),
        num_sections=2,
        capacity_policy=policy,
        draft_len=2,
        error_rate=0.002,
        failure_rate=0.05,
        cache={
            "snapshot_interval": 16,
            "snapshots_from_end": (4,),
            "branch_snapshots": True,
            "num_prefetch": 3,
            "offload_min_priority": 20,
            "event_buffer_size": 128,
        },
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_comes_to_rest(seed: int, tmp_path: Path) -> None:
    """Nothing to do is nothing done: blocks don't wander between the tiers when the last request has ended."""
    world = World(everything(tmp_path, "MAX_UTILIZATION"), seed=seed)
    for _ in range(4):
        run_rich(world, num_steps=50)
        world.drain(max_steps=300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_twenty_thousand_steps_with_everything(policy: str, tmp_path: Path) -> None:
    made = everything(tmp_path, policy)
    world = World(made, seed=77)
    run_rich(world, num_steps=22_500, restart_every=3_000)
    print(dict(world.moves), dict(world.seen))
    assert world.steps >= 20_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_worlds(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in range(1000, 1300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        first = World(setup(), seed=seed)
        world = World(draw(first.random, folder=str(folder)), seed=seed)
        try:
            run_rich(world, num_steps=150, restart_every=60)
        except AssertionError as error:
            raise AssertionError(f"world {seed}: {error}") from error
        total.update(world.seen)
    print(dict(total))
