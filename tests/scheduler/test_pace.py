"""The tokens of a step follow from how long steps took."""

from __future__ import annotations

import pytest

from headrace.scheduler.pace import FIRST_TOKENS, LEAST_TOKENS, Pace
from headrace.scheduler.settings import SchedulerSettings


def settings(**changes: object) -> SchedulerSettings:
    sizes = {"max_batch_size": 64, "max_num_tokens": 8192, "max_seq_len": 8192, "num_slots": 64}
    values: dict[str, object] = {**sizes, "tokens_per_block": 32}
    return SchedulerSettings(**(values | changes))  # pyright: ignore[reportArgumentType]


def run(pace: Pace, tokens_per_s: float, steps: int = 20, num_generation: int = 0) -> float:
    """Steps of prompts that never end -> how long the last one took."""
    seconds = 0.0
    for _ in range(steps):
        num_context = pace.budget(num_generation)
        seconds = (num_context + num_generation) / tokens_per_s
        pace.note(num_context, num_generation, seconds)
    return seconds


@pytest.mark.parametrize("tokens_per_s", [100, 260, 2000, 12_000])
def test_a_step_takes_its_time(tokens_per_s: float) -> None:
    pace = Pace(settings(max_step_s=0.5))
    assert pace.budget(0) == FIRST_TOKENS
    assert run(pace, tokens_per_s) == pytest.approx(0.5, abs=1 / tokens_per_s)


def test_it_follows_a_machine_that_slows_down_and_never_starves_prompts() -> None:
    pace = Pace(settings(max_step_s=0.5))
    run(pace, 4000)
    assert run(pace, 400, steps=8) < 0.6
    run(pace, 1)
    assert pace.budget(0) == LEAST_TOKENS
    run(pace, 1000)
    assert pace.budget(400) == pytest.approx(250, abs=1), "running generations leave half of a step to prompts"
    assert pace.budget(10_000) < 0, "but never more than max_num_tokens"


def test_the_bound_is_within_max_num_tokens_and_off_without_a_time_or_chunks() -> None:
    fast = Pace(settings(max_step_s=0.5, max_num_tokens=1000))
    run(fast, 1e6)
    assert fast.budget(0) == 1000
    for free in (Pace(settings()), Pace(settings(max_step_s=0.5, chunked_prefill=False))):
        run(free, 10)
        assert free.budget(192) == 8000


def test_small_steps_tell_nothing() -> None:
    pace = Pace(settings(max_step_s=0.5))
    assert not pace.note(LEAST_TOKENS - 1, 0, 100.0)
    assert not pace.note(500, 0, 0.0)
    assert pace.budget(0) == FIRST_TOKENS
    assert pace.note(64, 0, 0.5)
    assert pace.prefill_speed == 128.0
