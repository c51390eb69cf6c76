"""Blocks that come from an external store: room, names, leases, and what happens when they don't come."""

from __future__ import annotations

import pytest

from headrace.kvcache.loads import LOAD_TIMEOUT_S, Loads
from headrace.kvcache.manager import KvCache
from headrace.kvcache.radix import NONE
from headrace.kvcache.settings import CacheSettings
from headrace.seam import GroupSpec, PoolSizes

SIZE = 4
TOKENS = list(range(100, 125))
FULL = GroupSpec((0,), 1, 1, "float32", bytes_per_token=8)
WINDOW = GroupSpec((1,), 1, 1, "float32", window=5, bytes_per_token=8)


def make(*groups: GroupSpec, num_blocks: int = 12) -> tuple[KvCache, Loads]:
    groups = groups or (FULL,)
    settings = CacheSettings(tokens_per_block=SIZE, max_tokens_in_flight=8)
    kv = KvCache(groups, PoolSizes((num_blocks,) * len(groups), num_slots=2), settings)
    return kv, Loads(kv.store, kv.tiers, kv.lookup, kv.promises, section=0, stride=1)


def computed(kv: KvCache, tokens: list[int], owner: int = 1) -> None:
    kv.admit(owner, tokens)
    kv.extend(owner, len(tokens))
    kv.commit(owner, tokens, len(tokens))
    kv.release(owner)


def test_what_came_is_found_behind_what_was_here() -> None:
    kv, loads = make()
    computed(kv, TOKENS[:8])
    claim = kv.claim()
    assert loads.num_known(TOKENS, claim) == 2
    load = loads.begin(7, TOKENS, claim, 3)
    assert load is not None and load.id < 0 and load.first == 2 and len(set(load.blocks[0])) == 3
    assert kv.match(TOKENS) == 8 and kv.stats.num_leased == (5,) and loads.take_arrived() == []
    kv.check()
    loads.finish([load.id, 99])
    assert kv.match(TOKENS) == 20 and loads.take_arrived() == [7] and not loads.is_busy
    kv.check()
    kv.admit(7, TOKENS)
    assert kv.table(7)[2:] == load.blocks[0]


def test_a_failed_load_leaves_nothing() -> None:
    kv, loads = make()
    load = loads.begin(7, TOKENS, kv.claim(), 3)
    assert load is not None
    loads.finish([load.id], worked=False)
    assert kv.match(TOKENS) == 0 and loads.take_arrived() == [7] and kv.stats.num_free == (11,)
    assert kv.stats.failed_transfers == 1
    kv.check()


def test_no_more_than_is_promised_to_nobody() -> None:
    kv, loads = make()
    computed(kv, TOKENS[:8])
    kv.admit(2, [1, 2, 3, 4, 5], limit=7 * SIZE)
    assert loads.begin(7, TOKENS, kv.claim(), 3) is None, "the prefix would be held as well"
    assert loads.begin(7, TOKENS, kv.claim(), 2) is not None
    assert kv.extend(2, 7 * SIZE)
    kv.check()


def test_a_window_group_gets_what_is_in_reach() -> None:
    kv, loads = make(FULL, WINDOW)
    load = loads.begin(7, TOKENS, kv.claim(), 5)
    assert load is not None
    assert [block != NONE for block in load.blocks[1]] == [False, False, False, False, True]
    loads.finish([load.id])
    assert kv.match(TOKENS) == 20
    kv.check()


@pytest.mark.parametrize("abandoned", [False, True])
def test_who_waits_too_long_computes_and_what_comes_later_is_a_spare(abandoned: bool) -> None:
    kv, loads = make()
    load = loads.begin(7, TOKENS, kv.claim(), 2)
    assert load is not None
    if abandoned:
        loads.abandon(7)
    kv.advance(kv.store.keeping.now_s + LOAD_TIMEOUT_S + 1)
    assert loads.take_arrived() == ([] if abandoned else [7])
    computed(kv, TOKENS[:12], owner=7)
    before = kv.stats.num_free
    loads.finish([load.id])
    assert kv.match(TOKENS) == 12 and kv.stats.num_free[0] == before[0] + 2 and loads.take_arrived() == []
    kv.check()


def test_kept_blocks_stay_until_they_are_reported() -> None:
    kv, loads = make()
    kv.admit(1, TOKENS)
    kv.extend(1, len(TOKENS))
    kv.commit(1, TOKENS, 12)
    kept = loads.keep(kv.tables[1], 3)
    kv.release(1)
    assert loads.is_busy and kv.stats.num_leased == (3,)
    kv.check()
    loads.finish([kept])
    assert not loads.is_busy and kv.stats.num_cached == (3,)
    kv.check()
