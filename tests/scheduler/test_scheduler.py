"""Plans by hand-checked examples."""

from __future__ import annotations

import time

import pytest

from headrace.types import BeamSearch
from tests.scheduler.driver import Driver


def test_the_documents_worked_example() -> None:
    """Batch 4, 12 tokens, prompts 5, 5, 8, 2 (source b, section 7): whole prompts."""
    driver = Driver(chunked_prefill=False)
    for request_id, length in ((1, 5), (2, 5), (3, 8), (4, 2)):
        driver.add(request_id, length)
    assert driver.step() == {1: 5, 2: 5, 4: 2}  # R3 does not fit into what is left, R4 does
    assert driver.step() == {3: 8, 1: 1, 2: 1, 4: 1}
    assert driver.step() == {1: 1, 2: 1, 3: 1, 4: 1}


def test_the_worked_example_in_chunks() -> None:
    driver = Driver()
    for request_id, length in ((1, 5), (2, 5), (3, 8), (4, 2)):
        driver.add(request_id, length)
    assert driver.step() == {1: 5, 2: 5, 3: 2}
    assert driver.step() == {3: 6, 4: 2, 1: 1, 2: 1}


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("FIRST_COME_FIRST_SERVED", [{1: 12}, {1: 8, 2: 4}, {2: 8, 1: 1}]),
        ("EQUAL_PROGRESS", [{1: 8, 2: 4}]),
        ("FORCE_CHUNK", [{1: 4, 2: 4}, {1: 4, 2: 4}]),
    ],
)
def test_chunking_policies(policy: str, steps: list[dict[int, int]]) -> None:
    driver = Driver(chunking_policy=policy)
    driver.add(1, 20)
    driver.add(2, 20)
    for expected in steps:
        assert driver.step() == expected


@pytest.mark.parametrize(("policy", "first_step"), [("EQUAL_PROGRESS", 1), ("FIRST_COME_FIRST_SERVED", 8)])
def test_a_short_prompt_behind_a_long_one(policy: str, first_step: int) -> None:
    """The fair share: what came later need not wait for the whole of what came before."""
    driver = Driver(chunking_policy=policy)
    driver.add(1, 100)
    driver.step()
    driver.add(2, 4)
    steps = [driver.step() for _ in range(10)]
    assert next(at for at, step in enumerate(steps, 1) if 2 in step) == first_step
    assert sum(step.get(1, 0) for step in steps[:8]) >= 60, "and the long one goes on"


def test_unfinished_chunks_end_at_blocks() -> None:
    driver = Driver(max_num_tokens=11)
    driver.add(1, 30)
    assert [driver.step()[1] for _ in range(4)] == [8, 8, 8, 6]


def test_passing_a_long_prompt_is_bounded() -> None:
    """Whole prompts: short ones may go first, but not for ever."""
    driver = Driver(chunked_prefill=False, max_skips=3, max_batch_size=4)
    driver.add(1, 2, max_tokens=200)  # keeps one token of the budget busy
    driver.step()
    driver.add(2, 12)
    admitted_past = 0
    for request_id in range(3, 40):
        driver.add(request_id, 2, max_tokens=1)
        rows = driver.step()
        admitted_past += request_id in rows
        if 2 in rows:
            break
    assert admitted_past <= 4
    driver.drain()
    assert driver.finish_of(2) == "length"


def test_guaranteed_no_evict_admits_what_can_end() -> None:
    driver = Driver(num_blocks=9, max_num_tokens=100)  # 8 usable blocks of 4
    driver.add(1, 8, max_tokens=8)  # 4 blocks at its end
    driver.add(2, 8, max_tokens=12)  # 5: would not fit beside the first
    driver.add(3, 4, max_tokens=4)
    assert driver.step() == {1: 8}
    driver.drain()
    assert [driver.finish_of(each) for each in (1, 2, 3)] == ["length"] * 3


def test_max_utilization_preempts_the_last() -> None:
    driver = Driver(num_blocks=9, max_num_tokens=100, capacity_policy="MAX_UTILIZATION")
    driver.add(1, 8, max_tokens=16)
    driver.add(2, 8, max_tokens=16)
    preempted = 0
    assert driver.step() == {1: 8, 2: 8}
    while driver.scheduler.has_work:
        driver.step()
        preempted += driver.scheduler.counts.num_preempted
        assert driver.finish_of(2) is None or driver.finish_of(1) == "length", "the older one ends first"
    assert preempted >= 1


def test_static_batch_waits_for_the_last() -> None:
    driver = Driver(capacity_policy="STATIC_BATCH", max_num_tokens=100)
    driver.add(1, 4, max_tokens=2)
    driver.add(2, 4, max_tokens=5)
    driver.step()
    driver.add(3, 4)
    while driver.finish_of(2) is None:
        assert 3 not in driver.step()
    assert 3 in driver.step()


@pytest.mark.parametrize("by_priority", [True, False])
def test_queue_order(by_priority: bool) -> None:
    driver = Driver(queue_by_priority=by_priority, max_batch_size=1, max_num_tokens=100)
    for request_id, priority in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.5)):
        driver.add(request_id, 4, priority=priority, max_tokens=1)
    order: list[int] = []
    while driver.scheduler.has_work:
        order.extend(driver.step())
    assert order == ([2, 3, 4, 1] if by_priority else [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("changes", "length", "message"),
    [
        ({"num_blocks": 5}, 16, "16 tokens can never fit; at most 15"),
        ({"max_seq_len": 10}, 10, "at most 9 prompt tokens"),
        ({"chunked_prefill": False}, 13, "max_num_tokens=12"),
        ({}, 0, "is empty"),
    ],
)
def test_what_never_fits_is_refused(changes: dict[str, object], length: int, message: str) -> None:
    driver = Driver(**changes)  # type: ignore[arg-type]
    driver.add(1, length)
    driver.add(2, 3)
    driver.step()
    assert driver.deltas[0].finish == "error" and message in driver.deltas[0].error
    driver.drain()
    assert driver.finish_of(2) == "length"


def test_a_request_that_outgrows_the_pool_ends_with_length() -> None:
    driver = Driver(num_blocks=5)
    driver.add(1, 8, max_tokens=100)
    driver.add(2, 3)
    driver.drain()
    tokens = [token for delta in driver.deltas if delta.id == 1 for token in delta.tokens]
    assert driver.finish_of(1) == "length" and driver.finish_of(2) == "length" and tokens


def test_a_wide_beam_search_that_never_fits_is_refused() -> None:
    driver = Driver(num_blocks=9)
    driver.add(1, 8, beam=BeamSearch(width=4, num_return=4))
    driver.drain()
    assert driver.finish_of(1) == "error" and "at most 3 prompt tokens" in driver.deltas[0].error


@pytest.mark.parametrize("kind", ["grammar", "adapter", "encoder", "transfer"])
def test_a_held_request_lets_others_pass(kind: str) -> None:
    driver = Driver()
    now_s = time.monotonic()
    driver.add(1, 4, holds={kind: now_s + 100})
    driver.add(2, 4, max_tokens=1)
    assert driver.step() == {2: 4}
    driver.scheduler.release_hold(1, kind)
    assert driver.step() == {1: 4}


def test_holds_and_deadlines_are_swept_when_idle() -> None:
    driver = Driver()
    now_s = time.monotonic()
    driver.add(1, 4, holds={"grammar": now_s + 0.01})
    driver.add(2, 4, holds={"transfer": now_s + 100}, timeout_s=0.01)
    driver.scheduler.sweep(now_s + 1)
    deltas = {delta.id: delta for delta in driver.scheduler.take_deltas()}
    assert deltas[1].finish == "timeout" and "grammar" in deltas[1].error
    assert deltas[2].finish == "timeout"
    assert not driver.scheduler.has_work


def test_a_running_request_times_out() -> None:
    driver = Driver()
    driver.add(1, 4, timeout_s=0.02, max_tokens=200)
    driver.step()
    driver.scheduler.sweep(time.monotonic() + 1)
    driver.drain()
    assert driver.finish_of(1) == "timeout"


def test_abort_in_each_state() -> None:
    driver = Driver(max_batch_size=1, depth=1)
    for request_id in (1, 2):
        driver.add(request_id, 20, max_tokens=50)
    driver.scheduler.abort(2)  # waiting
    plan = driver.scheduler.plan(time.monotonic())
    assert plan is not None
    driver.engine.submit(plan)
    driver.scheduler.abort(1)  # a chunk of its prompt in flight
    driver.scheduler.abort(1)
    driver.scheduler.abort(99)
    driver.scheduler.commit(driver.engine.collect())
    driver.deltas.extend(driver.scheduler.take_deltas())
    assert not driver.scheduler.has_work
    stats = driver.scheduler.sections[0].kv.stats
    assert stats.num_leased == (0,)
    driver.scheduler.check()


def test_batch_wait_gathers_prompts() -> None:
    driver = Driver(batch_wait_iters=3, batch_wait_max_tokens_ratio=0.5, max_num_tokens=20)
    driver.add(1, 4)
    assert driver.step() == {}
    driver.add(2, 4)
    assert driver.step() == {}
    driver.add(3, 4)  # 12 of 20 tokens: enough
    assert driver.step() == {1: 4, 2: 4, 3: 4}
    driver.add(4, 4)
    seen = [4 in driver.step() for _ in range(4)]
    assert seen == [False, False, False, True]


def test_prefix_aware_admission_waits_for_a_neighbours_prefix() -> None:
    driver = Driver(max_num_tokens=100)
    driver.add(1, 12)
    driver.add(1 + 100, 12)  # the same prompt
    assert driver.step() == {1: 12}
    assert driver.step() == {1: 1, 101: 4}  # 8 of 12 tokens came from the first


def test_generation_rows_rotate_when_the_budget_is_short() -> None:
    driver = Driver(max_num_tokens=4, draft_len=1)  # a generation row takes two tokens
    for request_id in range(1, 5):
        driver.add(request_id, 1, max_tokens=6)
    assert set(driver.step()) == {1, 2, 3, 4}
    rows = [set(driver.step()) for _ in range(2)]
    assert len(rows[0]) == 2 and rows[0] | rows[1] == {1, 2, 3, 4}
    driver.drain()
