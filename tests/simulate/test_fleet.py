"""Fast-forwarding gives what the loop gives step by step, and the modelled engine obeys its clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.bench.pace import Closed, Open, Pace, poisson_arrivals
from headrace.bench.report import Lengths, Report, Step, Workload
from headrace.bench.workload import Task
from headrace.config.llm_args import LlmArgs
from headrace.config.resolution import resolve
from headrace.hub.rank_share import Ranks
from headrace.runtime.forecast import Spread
from headrace.runtime.gpus import gpu_named
from headrace.simulate.calibrate import _from_steps, check_device
from headrace.simulate.cost import Calibration
from headrace.simulate.fleet import Fleet, Outcome
from headrace.simulate.jitter import Jitter, spread_of
from headrace.simulate.model import Model, model_of
from headrace.simulate.routing import ROUTERS
from headrace.simulate.work import Work

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
WINDOWED = {**CONFIG, "model_type": "mistral", "sliding_window": 64}


def args_of(**settings: Any) -> LlmArgs:
    given = {"model": "m", "max_batch_size": 8, "max_seq_len": 512, **settings}
    return resolve(arguments=given, refuse_missing_features=False, for_this_machine=False).args


def model(config: dict[str, Any] = CONFIG, said: Calibration | None = None, **settings: Any) -> Model:
    spread = Spread(gpu_named("l4", num_ranks=1), Ranks())
    return model_of(args_of(**settings), config, spread, said or Calibration())


def tasks(count: int = 60, seed: int = 0) -> list[Task]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 1000, 40).tolist()
    found: list[Task] = []
    for number in range(count):
        prompt = rng.integers(0, 1000, int(rng.integers(4, 120))).tolist()
        if number % 3 == 2:
            found.append(Task(number, prompt[:20], int(rng.integers(1, 90)), after=number - 1))
        else:
            found.append(Task(number, shared + prompt if number % 2 else prompt, int(rng.integers(1, 90))))
    return found


def run(what: Model, pace: Pace, *, fast: bool, num_instances: int = 1, router: str = "round_robin") -> Outcome:
    fleet = Fleet(what, num_instances=num_instances, fast=fast)
    fleet.warm_up(tasks(2))
    outcome = fleet.run(tasks(), pace=pace, router=ROUTERS[router])
    for instance in fleet.instances:
        instance.core.scheduler.check()
    fleet.close()
    return outcome


SETTINGS: list[dict[str, Any]] = [
    {},
    {"disable_overlap_scheduler": True},
    {"kv_cache_config": {"max_tokens": 1024}, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
    {"kv_cache_config": {"max_tokens": 800}},
]
OPEN = Open(poisson_arrivals(60, rate=300.0))


@pytest.mark.parametrize("pace", [Closed(12), OPEN], ids=["closed", "open"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["overlap", "no overlap", "preempting", "short of blocks"])
def test_fast_forwarding_changes_nothing(settings: dict[str, Any], pace: Pace) -> None:
    assert_same(model(**settings), pace, num_instances=1)


def test_fast_forwarding_changes_nothing_with_windows_and_several_instances() -> None:
    assert_same(model(WINDOWED), Closed(9), num_instances=2)
    assert_same(model(), OPEN, num_instances=3, router="kv_cache_aware")


def test_fast_forwarding_changes_nothing_where_steps_vary() -> None:
    ratios = np.random.default_rng(3).lognormal(0.0, 0.4, 500)
    said = Calibration(generation_spread=spread_of(ratios), context_spread=spread_of(ratios[:40]))
    assert_same(model(said=said), OPEN, num_instances=2)
    assert_same(model(said=said, disable_overlap_scheduler=True), Closed(12), num_instances=1)


def test_steps_vary_as_they_were_measured_to() -> None:
    ratios = np.random.default_rng(3).lognormal(0.0, 0.4, 500)
    drawn = Jitter(spread_of(ratios), seed=1).factors(0, 20000)
    wanted = np.quantile(ratios, [0.1, 0.5, 0.9])
    np.testing.assert_allclose(np.quantile(drawn, [0.1, 0.5, 0.9]), wanted, rtol=0.05)
    assert drawn.mean() == pytest.approx(ratios.mean(), rel=0.02)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
    others = Jitter(spread_of(ratios), seed=2).factors(0, 20000)
    assert abs(np.corrcoef(drawn, others)[0, 1]) < 0.03


def assert_same(what: Model, pace: Pace, *, num_instances: int, router: str = "round_robin") -> None:
    slow, fast = (run(what, pace, fast=each, num_instances=num_instances, router=router) for each in (False, True))
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s", "num_cached"):
        assert np.array_equal(getattr(slow.record, name)(), getattr(fast.record, name)(), equal_nan=True), name
    gaps = [np.sort(each.record.itl_s()) for each in (slow, fast)]
    np.testing.assert_allclose(gaps[0], gaps[1], rtol=1e-9, atol=1e-12)
    assert slow.record.num_output.tolist() == fast.record.num_output.tolist() == [t.num_output for t in tasks()]
    assert (slow.record.num_steps, slow.num_preempted) == (fast.record.num_steps, fast.num_preempted)
    assert slow.num_requests == fast.num_requests
    assert fast.busy_shares == pytest.approx(slow.busy_shares)


def test_blocks_that_run_short_preempt_and_a_prefix_is_found() -> None:
    outcome = run(model(**SETTINGS[2]), Closed(12), fast=True)
    assert outcome.num_preempted > 0
    assert run(model(), Closed(1), fast=True).record.num_cached().sum() > 0


def test_one_request_alone_takes_what_its_steps_cost() -> None:
    what = model(enable_chunked_prefill=False)
    fleet = Fleet(what)
    record = fleet.run([Task(0, list(range(50)), 10)], pace=Closed()).record
    prompt = Work(1, 50, 1, (50 * 51 // 2,), (50,))
    steps = [prompt, *(Work(1, 1, 1, (50 + at,), (50 + at,)) for at in range(1, 10))]
    each = [max(float(what.cost.seconds(work)), what.cost.calibration.host_s) for work in steps]
    assert record.e2e_s()[0] == pytest.approx(sum(each) + what.cost.calibration.host_s, rel=1e-6)


def test_a_calibration_finds_the_factors_that_made_its_steps() -> None:
    cost = model().cost
    steps: list[Step] = []
    for count in (1, 2, 4, 64):
        for reach in (100, 5000, 40000):
            work = Work(count, count, count, (reach,), (reach,))
            seconds = (2 + count / 16) * cost.linear_s(work) + 3 * float(cost.attention_s(work))
            steps.append(Step(count, count, count, [reach], [reach], seconds, 1e-4))
    found = _from_steps(steps, cost, source="here")
    assert found.error is not None and found.error < 0.02
    assert found.factor(64) == pytest.approx(6, rel=0.05) and found.factor(1) == pytest.approx(2.06, rel=0.05)
    assert found.attention == pytest.approx(3, rel=0.1)


def test_a_slow_step_alone_in_its_size_makes_no_slow_size() -> None:
    """Steps scatter as on a busy machine, and the largest one, which is there once, was slow by chance."""
    cost, rng = model().cost, np.random.default_rng(5)

    def step(count: int, slower: float) -> Step:
        work = Work(count, count, count, (100,), (100,))
        return Step(count, count, count, [100], [100], 6 * slower * cost.linear_s(work), 1e-4)

    steps = [step(count, each) for count in (1, 2, 32, 35) for each in rng.lognormal(0.0, 0.4, 20)]
    found = _from_steps([*steps, step(37, 2.2)], cost, source="here")
    assert found.factor(37) == pytest.approx(found.factor(35), rel=0.2)
    quiet = _from_steps(
        [step(count, 1.0 + (count == 37)) for count in (1, 2, 32, 35, 37) for _ in range(4)], cost, source=""
    )
    assert quiet.factor(37) == pytest.approx(2 * quiet.factor(35), rel=0.1)


def test_a_calibration_is_of_the_device_that_is_modelled() -> None:
    one = Lengths(mean=1, min=1, max=1)
    workload = Workload(dataset="d", seed=0, warmup=0, eos_id=-1, input_len=one, output_len=one)

    def report(device: str) -> Report:
        machine = {"device": device, "cpu": "Some CPU"}
        return Report(kind="throughput", date="", model={}, machine=machine, num_gpus=1, settings={},
                      workload=workload, points=[])  # fmt: skip

    check_device(report("Some CPU, 2 threads"), None, source="r")
    check_device(report("NVIDIA H200"), "h200", source="r")
    check_device(report("NVIDIA A100-SXM4-40GB"), "a100-40gb", source="r")
    for device, modelled in (("Some CPU, 2 threads", "h200"), ("NVIDIA H200", None), ("NVIDIA H200", "h100")):
        with pytest.raises(ValueError, match="leave --calibrate out"):
            check_device(report(device), modelled, source="r")
