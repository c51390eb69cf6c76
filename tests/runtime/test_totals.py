"""What a runtime tells of itself beside its steps: the queue, and how much of the latest prompts was there."""

from __future__ import annotations

import time

from headrace.kvcache.stats import Counters
from headrace.runtime.totals import StepTotals
from headrace.types import Request, Sampling
from tests.sim.setup import setup
from tests.sim.world import World


def gauges(totals: StepTotals, world: World) -> dict[str, float]:
    return {sample.name: sample.value for sample in totals.snapshot(world.scheduler).gauges}


def test_the_queue() -> None:
    world, totals = World(setup()), StepTotals()
    empty = gauges(totals, world)
    assert empty["num_requests_waiting"] == empty["num_tokens_waiting"] == empty["queue_oldest_seconds"] == 0
    now_s = time.monotonic()
    for number, age_s in ((1, 5.0), (2, 60.0), (3, 1.0)):
        sampling = Sampling()
        world.scheduler.add(
            Request(id=number, prompt=[1, 2, 3], sampling=sampling, max_tokens=1, arrival_s=now_s - age_s)
        )
    full = gauges(totals, world)
    assert full["num_requests_waiting"] == 3 and full["num_tokens_waiting"] == 9
    assert 60 <= full["queue_oldest_seconds"] < 70


def test_the_latest_prompts_count() -> None:
    """The rate since the start is another one: it hides that prompts have stopped to be alike."""
    world, totals, counters = World(setup()), StepTotals(), Counters()
    assert gauges(totals, world)["kv_cache_iter_reuse_rate"] == 0
    for reused, missed, wanted in ((0, 4, 0.0), (3, 5, 0.75), (3, 5, 0.75), (3, 9, 0.0), (5, 9, 1.0)):
        counters.reused_blocks, counters.missed_blocks = reused, missed
        totals.record_reuse([counters, Counters()])
        assert gauges(totals, world)["kv_cache_iter_reuse_rate"] == wanted
