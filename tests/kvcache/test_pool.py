from __future__ import annotations

import random

import pytest

from headrace.kvcache.integrity import check_pool
from headrace.kvcache.pool import BlockPool
from headrace.types import DEFAULT_PRIORITY


def cached(pool: BlockPool, count: int) -> list[int]:
    """Takes, names and gives back, in order: the first is the least recently used."""
    blocks = pool.take(count)
    for block in blocks:
        pool.set_node(block, 1000 + block)
    pool.unlease_all(blocks)
    return blocks


def test_the_dummy_block_is_never_handed_out():
    pool = BlockPool(4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert (pool.num_total, pool.num_free, pool.num_leased, pool.num_available) == (3, 0, 3, 0)
    with pytest.raises(AssertionError, match="0 free"):
        pool.take(1)


def test_first_blocks_come_in_order():
    assert BlockPool(6).take(3) == [1, 2, 3]


def test_unnamed_blocks_are_free_and_named_ones_cached():
    pool = BlockPool(5)
    a, b = pool.take(2)
    pool.set_node(b, 7)
    pool.unlease_all([a, b])
    assert (pool.num_free, pool.num_cached, pool.num_leased) == (3, 1, 0)
    assert pool.evict(1) == [7]
    assert (pool.num_free, pool.num_cached) == (4, 0)
    check_pool(pool)


def test_eviction_is_least_recently_used_first():
    pool = BlockPool(6)
    a, b, c, d = cached(pool, 4)
    pool.touch(a)
    pool.lease(c)
    pool.unlease(c)
    assert list(pool.eviction_order()) == [b, d, a, c]
    assert pool.evict(3) == [1000 + b, 1000 + d, 1000 + a]
    check_pool(pool)


def test_lower_priority_goes_first():
    pool = BlockPool(8)
    a, b, c, d, e = cached(pool, 5)
    pool.set_priority(d, 0)
    pool.set_priority(a, 100)
    pool.set_priority(c, 36)
    pool.set_priority(b, 36)
    assert list(pool.eviction_order()) == [d, e, c, b, a]
    check_pool(pool)
    pool.evict(5)
    assert set(pool.priority) == {DEFAULT_PRIORITY}


def test_a_leased_block_is_never_evicted():
    pool = BlockPool(4)
    a, b, c = cached(pool, 3)
    pool.lease(b)
    pool.lease(b)
    pool.unlease(b)
    assert pool.evict(2) == [1000 + a, 1000 + c]
    with pytest.raises(AssertionError, match="0 blocks cached"):
        pool.evict(1)


def test_misuse_is_noticed():
    pool = BlockPool(4)
    (a,) = pool.take(1)
    pool.unlease(a)
    for misuse in (pool.unlease, pool.lease, pool.touch, pool.clear_node):
        with pytest.raises(AssertionError, match=f"block {a}"):
            misuse(a)
    with pytest.raises(AssertionError, match="free or indexed"):
        pool.set_node(a, 1)


def test_random_operations_equal_a_sorted_list():
    """Against the obvious twin: (priority, time of use) sorted at each eviction."""
    rng = random.Random(0)
    pool = BlockPool(30)
    used: dict[int, tuple[int, int]] = {}
    leased: list[int] = []
    for now in range(3000):
        act = rng.randrange(5)
        if act == 0 and pool.num_free:
            (block,) = pool.take(1)
            pool.set_node(block, block)
            leased.append(block)
        elif act == 1 and leased:
            block = leased.pop(rng.randrange(len(leased)))
            pool.unlease(block)
            used[block] = (pool.priority[block], now)
        elif act == 2 and used:
            block = rng.choice(list(used))
            priority = rng.choice([0, 20, 35, 100])
            pool.set_priority(block, priority)
            used[block] = (priority, now)
        elif act == 3 and used:
            block = rng.choice(list(used))
            pool.lease(block)
            leased.append(block)
            del used[block]
        elif act == 4 and used and rng.random() < 0.3:
            victim = min(used, key=lambda block: used[block])
            assert pool.evict(1) == [victim]
            del used[victim]
        assert list(pool.eviction_order()) == sorted(used, key=lambda block: used[block])
        check_pool(pool)


def test_put_back_restores_the_order():
    pool = BlockPool(8)
    blocks = cached(pool, 6)
    used = {block: pool.used[block] for block in blocks}
    for block in (blocks[1], blocks[4], blocks[0], blocks[5]):
        pool.lease(block)
    for block in (blocks[4], blocks[5], blocks[0], blocks[1]):
        pool.unlease(block)
        pool.put_back(block, used[block])
        check_pool(pool)
    assert list(pool.eviction_order()) == blocks


def test_what_a_window_has_passed_is_evicted_first_and_known_as_that():
    pool = BlockPool(8)
    old = cached(pool, 2)
    passed = pool.take(2)
    for block in passed:
        pool.set_node(block, 2000 + block)
        pool.unlease_first(block)
    assert pool.passed == set(passed)
    pool.lease(passed[1])  # somebody asks for it after all
    assert pool.passed == {passed[0]}
    pool.unlease(passed[1])
    assert pool.evict(1) == [2000 + passed[0]] and not pool.passed
    assert pool.evict(2) == [1000 + block for block in old]
    pool.lease(passed[1])
    pool.unlease_first(passed[1])
    pool.clear_node(passed[1])
    assert not pool.passed
    check_pool(pool)
