from __future__ import annotations

import pytest

from tests.kvcache.sim import Sim

CASES = {
    "page 1": {"tokens_per_block": 1, "num_blocks": (20,)},
    "page 2": {"tokens_per_block": 2, "num_blocks": (30,)},
    "page 16": {"tokens_per_block": 16, "num_blocks": (16,)},
    "two groups": {"tokens_per_block": 2, "num_blocks": (24, 17)},
}


@pytest.mark.parametrize("case", CASES)
def test_random_traffic_equals_the_twin(case: str):
    sim = Sim(1, **CASES[case])
    sim.run(2500)
    sim.drain()
    for what in ("hit", "miss", "refused", "full", "released", "failed", "fork"):
        assert sim.seen[what] > 5, f"the traffic has no {what}: {sim.seen}"
    assert sim.kv.stats.evictions > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_random_traffic_equals_the_twin_for_long(case: str, seed: int):
    sim = Sim(seed, **CASES[case])
    sim.run(10_000)
    sim.drain()
