from __future__ import annotations

import random

import pytest

from headrace.kvcache.retention import Expiry, priority_of
from headrace.types import DEFAULT_PRIORITY, Retention, RetentionRange

SYSTEM = RetentionRange(0, 10, 90)
MIDDLE = RetentionRange(10, 20, 5, 2.5)
REST = RetentionRange(24, None, 60)
RETENTION = Retention(ranges=(SYSTEM, MIDDLE, REST), decode_priority=12, decode_duration_s=7.0)


def of(start: int, end: int, *, prompt_len: int = 30, retention: Retention | None = RETENTION):
    return priority_of(retention, prompt_len=prompt_len, start=start, end=end)


def test_the_range_of_the_first_token_wins():
    assert of(0, 4) == (90, None)
    assert of(8, 12) == (90, None), "partly covered: its first token is in the first range"
    assert of(10, 14) == (5, 2.5)
    assert of(19, 23) == (5, 2.5)
    assert of(20, 24) == (DEFAULT_PRIORITY, None), "in no range"
    assert of(20, 28) == (DEFAULT_PRIORITY, None), "a range that begins inside gives it nothing"
    assert of(24, 28) == (60, None), "an open range goes to the prompt's end"


def test_decoded_blocks_have_no_prompt_token():
    assert of(28, 32) == (60, None), "the prompt's last tokens are in it"
    assert of(30, 34) == (12, 7.0)
    assert of(100, 104) == (12, 7.0)
    assert of(0, 4, prompt_len=0) == (12, 7.0)
    assert of(24, 28, prompt_len=24) == (12, 7.0), "an open range is for the prompt only"


def test_without_retention_all_is_default():
    assert of(0, 4, retention=None) == (35, None)
    assert of(40, 44, retention=None) == (35, None)
    assert of(40, 44, retention=Retention()) == (35, None)


def test_the_first_of_two_ranges_wins_where_they_overlap():
    both = Retention(ranges=(RetentionRange(0, 8, 1), RetentionRange(4, 12, 2)))
    assert of(4, 8, retention=both)[0] == 1
    assert of(8, 12, retention=both)[0] == 2


def test_each_deadline_is_told_once_in_order():
    expiry = Expiry()
    expiry.add(5.0, 0, 1, 11)
    expiry.add(3.0, 1, 1, 12)
    expiry.add(3.0, 0, 2, 13)
    assert expiry.due(2.9) == []
    assert expiry.due(3.0) == [(1, 1, 12), (0, 2, 13)]
    assert expiry.due(4.0) == []
    assert expiry.due(99.0) == [(0, 1, 11)]
    assert len(expiry) == 0


def test_a_new_deadline_replaces_the_old_one_and_a_removed_block_is_not_told():
    expiry = Expiry()
    expiry.add(1.0, 0, 1, 11)
    expiry.add(9.0, 0, 1, 21)
    expiry.add(2.0, 0, 2, 12)
    expiry.remove(0, 2)
    expiry.remove(0, 3)
    assert expiry.due(5.0) == []
    assert expiry.due(9.0) == [(0, 1, 21)]


def test_blocks_that_come_and_go_leave_nothing_behind():
    expiry = Expiry()
    for turn in range(10_000):
        expiry.add(1e6 + turn, 0, turn % 10, turn)
    assert len(expiry) == 10
    assert len(expiry._heap) <= 2 * 10 + 65


@pytest.mark.parametrize("seed", range(5))
def test_expiry_agrees_with_a_plain_dict(seed: int):
    rng = random.Random(seed)
    expiry, twin, now = Expiry(), dict[tuple[int, int], tuple[float, int, int]](), 0.0
    for serial in range(3000):
        key = (rng.randrange(2), rng.randrange(20))
        if rng.random() < 0.6:
            twin[key] = (now + rng.randrange(50), serial, rng.randrange(1000))
            expiry.add(twin[key][0], *key, twin[key][2])
        elif rng.random() < 0.3:
            twin.pop(key, None)
            expiry.remove(*key)
        else:
            now += rng.randrange(10)
            over = sorted((value, key) for key, value in twin.items() if value[0] <= now)
            assert expiry.due(now) == [(*key, value[2]) for value, key in over]
            for _, key in over:
                del twin[key]
        assert len(expiry) == len(twin)
