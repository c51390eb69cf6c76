"""Thousands of simulated steps with random traffic: exact tokens, integrity after each commit."""

from __future__ import annotations

import itertools

import pytest

from headrace.engine.fake import FakeEngine
from tests.sim.world import World, beam, settings


def run(world: World, *, num_steps: int, beams: bool = True) -> None:
    rng = world.random
    for _ in range(num_steps):
        if rng.random() < 0.35 and len(world.scheduler.queue) < 12:
            wide = beams and rng.random() < 0.1
            world.add(world.request(beam=beam(rng.randint(2, 4))) if wide else world.request())
        if rng.random() < 0.05:
            going = [told.request.id for told in world.told.values() if told.end is None]
            if going:
                world.abort(rng.choice(going))
        world.step()
    world.drain()
    world.verify()


CASES = list(
    itertools.product((0, 1, 3), (True, False), ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"), (0, 3))
)


@pytest.mark.parametrize(("depth", "chained", "policy", "draft_len"), CASES)
def test_random_traffic(depth: int, chained: bool, policy: str, draft_len: int) -> None:
    config = settings(depth=depth, chained=chained, capacity_policy=policy, draft_len=draft_len)
    seed = CASES.index((depth, chained, policy, draft_len))
    world = World(config, seed=seed, num_groups=1 + seed % 2, num_sections=1 + seed % 3 // 2, num_blocks=30 + seed)
    run(world, num_steps=300)
    assert world.steps > 100


@pytest.mark.parametrize("chunking", ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"])
@pytest.mark.parametrize("reuse", [True, False])
def test_policies(chunking: str, reuse: bool) -> None:
    config = settings(chunking_policy=chunking, reuse=reuse, queue_by_priority=True, max_num_tokens=13)
    run(World(config, seed=5), num_steps=300)


def test_whole_prompts_with_errors() -> None:
    config = settings(chunked_prefill=False, max_num_tokens=70)
    world = World(config, seed=9, error_rate=0.01)
    run(world, num_steps=400)
    assert any(told.end is not None and told.end.finish == "error" for told in world.told.values())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_ten_thousand_steps(policy: str) -> None:
    config = settings(capacity_policy=policy, draft_len=2)
    world = World(config, seed=77, num_sections=2, num_groups=2, num_blocks=34)
    run(world, num_steps=10_000)


def test_tiny_pool_preempts_and_stays_exact() -> None:
    world = World(settings(capacity_policy="MAX_UTILIZATION"), num_blocks=16, seed=3)
    preempted = 0
    for _ in range(400):
        if world.random.random() < 0.4 and len(world.scheduler.queue) < 10:
            world.add(world.request(cache_salt="", max_tokens=world.random.randint(10, 40)))
        world.step()
        preempted += world.scheduler.counts.num_preempted
    world.drain()
    world.verify()
    assert preempted > 10


# ---- faults that the simulation must catch ------------------------------------------------------


class SwappedRows(FakeEngine):
    def collect(self):  # type: ignore[no-untyped-def]
        result = super().collect()
        for rows in result.sections:
            if len(rows.tokens) > 1:
                rows.tokens[:2] = rows.tokens[1::-1].copy()
        return result


def _world(engine_class: type[FakeEngine] = FakeEngine) -> World:
    return World(settings(capacity_policy="MAX_UTILIZATION"), seed=11, num_blocks=26, engine_class=engine_class)


def test_catches_a_swapped_row() -> None:
    with pytest.raises(AssertionError):
        run(_world(SwappedRows), num_steps=200)


def test_catches_a_dropped_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world()
    admit = world.caches[0].admit
    monkeypatch.setattr(world.caches[0], "admit", lambda *a, salt="", **k: admit(*a, salt="", **k))
    with pytest.raises(AssertionError, match="instead of"):
        run(world, num_steps=400)


def test_catches_a_block_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world()
    cache = world.caches[0]
    extend, calls = cache.extend, itertools.count()

    def faulty(owner: int, num_tokens: int) -> bool:
        if next(calls) % 20 == 19 and cache.table(owner):
            cache.pools[0].unlease(cache.table(owner)[0])
        return extend(owner, num_tokens)

    monkeypatch.setattr(cache, "extend", faulty)
    with pytest.raises(AssertionError):
        run(world, num_steps=200)


def test_catches_a_lost_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world()
    cache = world.caches[0]
    fork = cache.fork
    monkeypatch.setattr(cache, "fork", lambda *a: fork(*a)[:0])
    with pytest.raises(AssertionError):
        for _ in range(6):
            world.add(world.request(beam=beam(3), max_tokens=20, stop_ids=()))
        run(world, num_steps=100)
        _verify_beams(world)


def _verify_beams(world: World) -> None:
    solo: list[list[list[int]]] = []
    together: list[list[list[int]]] = []
    for told in list(world.told.values()):
        if told.request.beam is None or told.end is None or told.end.beams is None:
            continue
        alone = World(settings(), seed=1, num_blocks=200)
        alone_told = alone.add(told.request)
        alone.drain()
        assert alone_told.end is not None and alone_told.end.beams is not None
        solo.append([b.tokens for b in alone_told.end.beams])
        together.append([b.tokens for b in told.end.beams])
    assert solo and solo == together, "beams depend on their neighbours"


def test_beams_do_not_depend_on_neighbours() -> None:
    world = _world()
    for _ in range(4):
        world.add(world.request(beam=beam(3), max_tokens=20, stop_ids=()))
    run(world, num_steps=100)
    _verify_beams(world)
