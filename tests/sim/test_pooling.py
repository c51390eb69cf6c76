"""Requests for hidden states among others: exact in any chunks, and nothing of them stays."""

from __future__ import annotations

import pytest

from tests.sim.setup import GROUPS, setup
from tests.sim.world import VOCAB, World


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [0, 1])
def test_in_chunks_and_among_neighbours(groups: str, depth: int) -> None:
    world = World(setup(groups=GROUPS[groups], num_blocks=60, max_num_tokens=8, depth=depth), seed=5)
    for step in range(100):
        if step % 3 == 0 and len(world.scheduler.queue) < 12:
            pooling = ("last", "mean", "")[step // 3 % 3]
            world.add(world.request(pooling=pooling))
        world.step()
    world.drain()
    world.verify()
    assert sum(bool(told.request.pooling) for told in world.told.values()) > 10


def test_preempted_in_the_middle_of_a_prompt() -> None:
    world = World(setup(num_blocks=14, max_num_tokens=6, capacity_policy="MAX_UTILIZATION"), seed=1)
    for step in range(400):
        if step % 4 == 0 and len(world.scheduler.queue) < 12:
            world.add(world.request(pooling="mean" if step % 8 else "", max_tokens=20))
        world.step()
    world.drain()
    world.verify()
    assert world.seen["preempted"] > 2


def test_nothing_is_found_in_the_cache_and_nothing_is_left_there() -> None:
    world = World(setup(), seed=2)
    prompt = [world.random.randrange(1, VOCAB) for _ in range(30)]
    world.add(world.request(prompt=prompt, cache_salt="", max_tokens=2, stop_ids=()))
    world.drain()
    before = world.caches[0].stats
    for pooling in ("last", "mean", "last"):
        told = world.add(world.request(prompt=prompt, pooling=pooling, cache_salt=""))
        world.drain()
        assert told.end is not None and told.end.cached_tokens == 0
    after = world.caches[0].stats
    assert (after.num_cached, after.num_free) == (before.num_cached, before.num_free)
    again = world.add(world.request(prompt=prompt, cache_salt="", max_tokens=2))
    world.drain()
    assert again.end is not None and again.end.cached_tokens == 29, "what was there before stays"
