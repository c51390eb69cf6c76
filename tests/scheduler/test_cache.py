"""What the scheduler asks of the cache: windows, pins, the disk, snapshots, coming back."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.kvcache.manager import KvCache
from headrace.kvcache.settings import CacheSettings
from headrace.scheduler.scheduler import Scheduler, StepCounts
from headrace.seam import GroupSpec, PoolSizes
from headrace.types import BeamSearch, Request, Retention, RetentionRange, Sampling
from tests.scheduler.driver import Driver

FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=4)
STATE = GroupSpec((1,), 0, 0, "float32", state_bytes=64)


def window(size: int) -> GroupSpec:
    return GroupSpec((1,), 1, 8, "float32", window=size, bytes_per_token=4)


def test_a_long_request_runs_in_a_small_window_pool() -> None:
    driver = Driver(num_blocks=(60, 8), specs=(FULL, window(6)), cache={"max_tokens_in_flight": 12})
    driver.add(1, 100, max_tokens=60)
    driver.drain()
    assert driver.finish_of(1) == "length"
    assert driver.cache.stats.num_leased == (0, 0)


def test_the_refusal_knows_windows() -> None:
    driver = Driver(num_blocks=(60, 5), specs=(FULL, window(6)), cache={"max_tokens_in_flight": 12})
    driver.add(1, 20)
    driver.drain()
    assert driver.finish_of(1) == "error" and "at most 15 prompt tokens" in driver.deltas[0].error


def test_window_promises_are_kept_side_by_side() -> None:
    driver = Driver(num_blocks=(200, 17), specs=(FULL, window(6)), cache={"max_tokens_in_flight": 12})
    for request_id in range(1, 7):
        driver.add(request_id, 30, max_tokens=40)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, driver.scheduler.num_active)
    assert most == 3 and all(driver.finish_of(request_id) == "length" for request_id in range(1, 7))


@pytest.mark.parametrize("policy", ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"])
def test_a_pinned_prompt_stays(policy: str) -> None:
    driver = Driver(num_blocks=20, capacity_policy=policy)
    driver.add(1, 9, pin="system", max_tokens=2)
    driver.drain()
    (pin,) = driver.scheduler.pins()
    assert (pin.name, pin.num_tokens) == ("system", 8)
    for request_id in range(2, 12):
        driver.add(request_id, 30, max_tokens=20)
        driver.drain()
        assert driver.finish_of(request_id) == "length"
    driver.add(101, 9, prompt=[(13 + at) % 100 for at in range(9)])
    driver.drain()
    assert max(delta.cached_tokens for delta in driver.deltas if delta.id == 101) == 8
    assert driver.scheduler.unpin("system") and not driver.scheduler.unpin("system")


def test_a_pin_that_leaves_less_room_than_requests_may_need_is_told(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(num_blocks=20)
    longest = driver.cache.max_tokens()
    with caplog.at_level("WARNING", logger="headrace"):
        driver.add(1, 9, pin="system", max_tokens=2)
        driver.drain()
    left = driver.cache.max_tokens()
    assert left < longest <= driver.scheduler.settings.max_seq_len
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'system' is pinned" in line and f"room for {left} tokens and not for {longest}" in line
    large = Driver(num_blocks=20, max_seq_len=left - 8)
    caplog.clear()
    large.add(1, 9, pin="system", max_tokens=2)
    large.drain()
    assert large.scheduler.pins() and not caplog.records


def test_a_refused_pin_does_not_fail_the_request() -> None:
    driver = Driver(num_blocks=11, cache={"max_pinned_share": 0.1})
    driver.add(1, 12, pin="system", max_tokens=2)
    driver.drain()
    assert driver.finish_of(1) == "length" and not driver.scheduler.pins()
    assert "may hold 1" in next(delta.error for delta in driver.deltas if delta.finish)


def test_a_prompt_that_no_longer_fits_beside_pins_is_told_so() -> None:
    driver = Driver(num_blocks=11, max_batch_size=1)
    driver.add(1, 17, pin="system", max_tokens=2)
    driver.add(2, 30, max_tokens=2)
    driver.add(3, 10, max_tokens=100)
    computed = 0
    while driver.scheduler.has_work:
        computed += driver.step().get(3, 0)
    ends = {delta.id: delta for delta in driver.deltas if delta.finish}
    assert ends[2].finish == "error" and "at most 23 do; unpin some of: system" in ends[2].error
    assert ends[3].finish == "length"
    assert computed == 23, "it ends where the room beside the pins does, with 24 tokens"


@pytest.mark.parametrize(("length", "error"), [(24, "at most 23 do; unpin some of: system"), (40, "can never fit")])
def test_a_prompt_that_does_not_fit_beside_pins_is_refused_with_their_names(length: int, error: str) -> None:
    driver = Driver(num_blocks=11)
    driver.add(1, 17, pin="system", max_tokens=2)
    driver.drain()
    driver.add(2, length)
    driver.drain()
    (end,) = [delta for delta in driver.deltas if delta.id == 2]
    assert end.finish == "error" and error in end.error
    assert driver.scheduler.unpin("system")
    driver.add(3, 24)
    driver.drain()
    assert driver.finish_of(3) == "length"


def test_beams_of_a_model_with_recurrent_layers_are_refused() -> None:
    beam = BeamSearch(width=2, num_return=2)
    driver = Driver(specs=(FULL, STATE))
    driver.add(1, 9, beam=beam)
    driver.add(2, 9)
    driver.drain()
    assert (driver.finish_of(1), driver.finish_of(2)) == ("error", "length")
    error = next(delta.error for delta in driver.deltas if delta.id == 1)
    assert "beam search" in error and "recurrent" in error
    asked = Request(id=3, prompt=[1, 2], sampling=Sampling(), max_tokens=2, arrival_s=0.0, beam=beam)
    assert driver.scheduler.refusal(asked) == error
    assert Driver(specs=(FULL,)).scheduler.refusal(asked) == ""


def test_a_request_waits_for_its_blocks_on_disk() -> None:
    driver = Driver()
    asked: list[int] = []

    def fetch(owner: int, *_: Any) -> bool:
        asked.append(owner)
        return owner == 1

    driver.cache.fetch = fetch  # type: ignore[method-assign]
    driver.add(1, 4, max_tokens=1)
    driver.add(2, 4, max_tokens=1)
    assert driver.step() == {2: 4} and asked == [1, 2]
    assert driver.step() == {}
    driver.cache.take_arrived = lambda: [1]  # type: ignore[method-assign]
    assert driver.step() == {1: 4} and asked == [1, 2], "asked once"
    driver.drain()


def test_blocks_of_the_next_in_the_queue_are_fetched_ahead() -> None:
    driver = Driver(max_batch_size=1, cache={"num_prefetch": 2})
    asked: list[int] = []
    driver.cache.fetch = lambda owner, *_: bool(asked.append(owner))  # type: ignore[method-assign, func-returns-value]
    for request_id in range(1, 6):
        driver.add(request_id, 4, max_tokens=20)
    driver.step()
    assert asked == [1, 2, 3]
    driver.drain()


def test_where_there_was_no_room_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(max_batch_size=1, cache={"num_prefetch": 2})
    asked: list[int] = []
    driver.cache.fetch = lambda owner, *_: bool(asked.append(owner))  # type: ignore[method-assign, func-returns-value]
    with monkeypatch.context() as patch:
        patch.setattr(KvCache, "is_fetch_full", property(lambda _: True))
        for request_id in range(1, 4):
            driver.add(request_id, 4, max_tokens=20)
        driver.step()
        driver.step()
        assert asked == [1, 2, 3, 2, 3]
    driver.step()
    driver.step()
    assert asked == [1, 2, 3, 2, 3, 2, 3], "there was nothing for them on disk: once is enough"
    driver.drain()


@pytest.mark.parametrize("has_arrived", [False, True])
def test_an_aborted_request_abandons_its_fetch(has_arrived: bool) -> None:
    driver = Driver(max_batch_size=1, cache={"num_prefetch": 1})
    gone: list[int] = []
    driver.cache.fetch = lambda owner, *_: owner == 2  # type: ignore[method-assign]
    driver.cache.abandon = gone.append  # type: ignore[method-assign]
    driver.add(1, 4, max_tokens=20)
    driver.add(2, 4)
    driver.step()
    if has_arrived:  # it waits for its slot, and what it has got is held for it
        driver.cache.take_arrived = lambda: [2]  # type: ignore[method-assign]
        driver.step()
    driver.scheduler.abort(2)
    assert gone == [2]
    driver.drain()


def test_who_has_its_blocks_from_disk_goes_where_they_are() -> None:
    driver = Driver()
    cache = driver.cache
    caches = [cache, KvCache(cache.groups, PoolSizes((60,), 8), cache.settings, section=1, num_sections=2)]
    scheduler = Scheduler(driver.scheduler.settings, caches)
    gone: list[tuple[int, int]] = []
    for at, each in enumerate(caches):
        each.has_fetched = lambda owner, at=at: (owner, at) in {(2, 0), (3, 1)}  # type: ignore[method-assign]
        each.abandon = lambda owner, at=at: gone.append((owner, at))  # type: ignore[method-assign]
    for request_id in (1, 2, 3, 4):
        prompt = [request_id * 10 + at for at in range(4)]
        scheduler.add(Request(id=request_id, prompt=prompt, sampling=Sampling(), max_tokens=2, arrival_s=0.0))
    scheduler.plan(0.0)
    held = [[at for at in (1, 2, 3, 4) if at in section.slots.request_id] for section in scheduler.sections]
    assert sorted(held[0] + held[1]) == [1, 2, 3, 4]
    assert 2 in held[0] and 3 in held[1]
    assert sorted(gone) == [(owner, 1 if owner in held[0] else 0) for owner in (1, 2, 3, 4)]


def test_chunks_end_at_snapshots() -> None:
    driver = Driver(num_blocks=(60, 9), specs=(FULL, STATE), cache={"snapshot_interval": 8}, max_num_tokens=100)
    driver.add(1, 21, max_tokens=1)
    assert [driver.step() for _ in range(3)] == [{1: 8}, {1: 8}, {1: 5}]
    driver.add(101, 21, prompt=[(13 + at) % 100 for at in range(21)], max_tokens=1)
    assert driver.step() == {101: 5}
    driver.drain()


def test_a_preempted_request_comes_back_to_its_blocks() -> None:
    driver = Driver(num_blocks=9, host=40, max_num_tokens=100, capacity_policy="MAX_UTILIZATION")
    for request_id in (1, 2, 3):
        driver.add(request_id, 8, max_tokens=16)
    preempted, computed = 0, 0
    while driver.scheduler.has_work:
        computed += sum(driver.step().values())
        preempted += driver.scheduler.counts.num_preempted
    assert preempted and all(driver.finish_of(each) == "length" for each in (1, 2, 3))
    assert computed <= 3 * (8 + 15) + 4 * preempted, "only what a block had not yet held is computed again"


def test_coming_back_waits_for_room() -> None:
    """Request 2 is preempted; as long as 1 holds most of the pool it stays out, although it would fit for a while."""
    driver = Driver(
        num_blocks=9, max_num_tokens=100, capacity_policy="MAX_UTILIZATION", cache={"max_util_for_resume": 0.5}
    )
    driver.add(1, 8, max_tokens=16)
    driver.add(2, 8, max_tokens=16)
    came_back = [rows for _ in range(60) if (rows := driver.step()) and rows.get(2, 0) > 1]
    assert driver.finish_of(1) == driver.finish_of(2) == "length"
    assert len(came_back) == 2, "its prompt, and once after it had to leave"


def test_retention_is_what_the_request_says() -> None:
    driver = Driver(num_blocks=13)
    retention = Retention(ranges=(RetentionRange(0, None, 90),), decode_priority=0)
    driver.add(1, 9, max_tokens=12, retention=retention)
    driver.drain()
    driver.add(2, 20, max_tokens=8)
    driver.drain()
    driver.add(101, 9, prompt=[(13 + at) % 100 for at in range(9)])
    driver.drain()
    assert max(delta.cached_tokens for delta in driver.deltas if delta.id == 101) == 8


def test_the_speed_of_prefill_reaches_the_cache() -> None:
    cache = KvCache((FULL,), PoolSizes((60,), 8), CacheSettings(tokens_per_block=4))
    driver = Driver()
    scheduler = Scheduler(driver.scheduler.settings, [cache])
    scheduler._measure(StepCounts(num_context_tokens=12), 0.0)
    scheduler._measure(StepCounts(num_context_tokens=2), 1.0)
    assert cache.lookup.prefill_tokens_per_s == 0.0
    scheduler._measure(StepCounts(num_context_tokens=12), 2.0)
    assert cache.lookup.prefill_tokens_per_s == 6.0
