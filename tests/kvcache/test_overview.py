from __future__ import annotations

import dataclasses
import random

import pytest

from headrace import wire
from headrace.engine.fake_memory import full_group, recurrent_group, window_group
from headrace.kvcache.manager import KvCache
from headrace.kvcache.overview import MAX_CHILDREN, MAX_SPACES, PrefixTree, pool_maps
from headrace.kvcache.settings import CacheSettings
from headrace.seam import GroupSpec, PoolSizes

BLOCK = 4


def cache(*groups: GroupSpec, num_blocks: int = 41, host: int = 0, **changes: object) -> KvCache:
    groups = groups or (full_group(),)
    sizes = PoolSizes((num_blocks,) * len(groups), 4, (host,) * len(groups) if host else ())
    settings = CacheSettings(tokens_per_block=BLOCK, fingerprint="fake")
    return KvCache(groups, sizes, dataclasses.replace(settings, **changes))  # type: ignore[arg-type]


def run(kv: KvCache, owner: int, tokens: list[int], *, salt: str = "", scope: str = "", keep: bool = False) -> None:
    """A request with all of its tokens computed; it ends unless it is kept."""
    kv.admit(owner, tokens, claim=kv.claim(salt=salt, scope=scope))
    assert kv.extend(owner, len(tokens))
    kv.commit(owner, tokens, len(tokens))
    if not keep:
        kv.release(owner, tokens=tokens, num_computed=len(tokens))


def tree(kv: KvCache, **wanted: object) -> list[wire.Prefix]:
    found = PrefixTree(**{"max_prefixes": 100, **wanted})  # type: ignore[arg-type]
    found.add(kv, section=0)
    return found.prefixes


@pytest.mark.parametrize("max_cells", [1, 7, 1000])
@pytest.mark.parametrize("groups", [(), (full_group(), window_group(9)), (full_group(), recurrent_group(1))])
def test_cells_add_up_to_the_counts(groups: tuple[GroupSpec, ...], max_cells: int) -> None:
    kv = cache(*groups, host=9)
    rng = random.Random(max_cells)
    for owner in range(9):
        run(kv, owner, [rng.randrange(3) for _ in range(rng.randrange(2, 17))], keep=owner % 4 == 0)
    stats = kv.stats
    maps = pool_maps(kv, section=3, max_cells=max_cells)
    assert [(one.tier, one.group) for one in maps] == [
        (tier, group) for tier in ("device", "host") for group in range(len(kv.groups))
    ]
    for number, one in enumerate(maps):
        pool = kv.store.pools[number]
        assert one.section == 3 and one.num_total == pool.num_total
        assert len(one.used) == len(one.cached) == -(-pool.num_total // one.blocks_per_cell)
        assert sum(one.used) == one.num_used == pool.num_leased
        assert sum(one.cached) == one.num_cached == pool.num_cached
        assert one.num_free == pool.num_free
        for cell, (used, cached) in enumerate(zip(one.used, one.cached)):
            blocks = range(1 + cell * one.blocks_per_cell, min(pool.num_blocks, 1 + (cell + 1) * one.blocks_per_cell))
            assert used == sum(pool.leases[block] > 0 for block in blocks)
            assert cached == sum(not pool.leases[block] and pool.node[block] >= 0 for block in blocks)
    assert sum(len(one.used) for one in maps) <= max(max_cells, 2 * len(kv.groups))
    for group in range(len(kv.groups)):
        assert maps[group].num_used == stats.num_leased[group] and maps[group].num_cached == stats.num_cached[group]


def test_pools_too_large_to_scan_have_counts_only() -> None:
    kv = cache(num_blocks=101, host=50)
    run(kv, 1, list(range(10)))
    device, host = pool_maps(kv, section=0, max_cells=10, max_scanned=99)
    assert device.used == device.cached == [] and device.num_cached == 3
    assert len(host.used) > 0


def test_runs_join_until_they_branch() -> None:
    kv = cache()
    shared = list(range(8))
    run(kv, 1, [*shared, 20, 21, 22, 23, 24, 25, 26, 27], keep=True)
    run(kv, 2, [*shared, 30, 31, 32, 33])
    root, run_, *branches = tree(kv)
    assert (root.parent, root.num_tokens, root.num_below) == (-1, 0, 1)
    assert (run_.parent, run_.start, run_.num_tokens, run_.num_blocks, run_.num_below) == (0, 0, 8, 2, 2)
    assert run_.num_holders == 1 and run_.on_tier == [2]
    assert [(one.parent, one.start, one.num_tokens, one.num_holders) for one in branches] == [
        (1, 8, 8, 1),
        (1, 8, 4, 0),
    ]


def test_a_suffix_counts_its_own_tokens() -> None:
    kv = cache(partial_reuse=True)
    run(kv, 1, list(range(6)))
    _, run_ = tree(kv)
    assert (run_.num_tokens, run_.num_blocks, run_.on_tier) == (6, 2, [2])


class TestSecrecy:
    def test_tokens_are_told_only_when_asked_for(self) -> None:
        kv = cache()
        run(kv, 1, list(range(8)))
        assert all(one.tokens == [] for one in tree(kv))
        assert tree(kv, max_tokens=6)[1].tokens == [0, 1, 2, 3, 4, 5]

    def test_of_the_own_salt_alone(self) -> None:
        kv = cache()
        run(kv, 1, list(range(8)), salt="mine")
        run(kv, 2, list(range(8)), salt="theirs")
        run(kv, 3, list(range(8)))
        found = tree(kv, salt="mine", max_tokens=8)
        assert [len(one.tokens) for one in found if one.parent >= 0] == [8, 0, 0]
        assert [one.is_own for one in found if one.parent < 0] == [True, False, False], "the asker's comes first"
        own = PrefixTree(100, salt="mine", with_others=False, max_tokens=8)
        own.add(kv, section=0)
        assert all(one.is_own for one in own.prefixes) and own.num_hidden == 2

    def test_a_private_scope_tells_nothing(self) -> None:
        kv = cache()
        run(kv, 1, list(range(8)), scope="a conversation")
        found = tree(kv, max_tokens=8)
        assert found[0].is_private and all(not one.tokens for one in found)
        assert tree(kv, max_tokens=8, with_others=False) == []

    def test_names_are_the_same_for_the_same_prefix_and_say_nothing_else(self) -> None:
        kv, other = cache(), cache()
        run(kv, 1, list(range(8)))
        run(other, 1, list(range(8)), keep=True)
        run(other, 2, list(range(8)), salt="x")
        names = [one.name for one in tree(other) if one.parent >= 0]
        assert names[0] == tree(kv)[1].name and len(set(names)) == 2, "another namespace, another name"


class TestBounds:
    def test_many_branches_and_namespaces_are_counted(self) -> None:
        kv = cache(num_blocks=200)
        for first in range(40):
            run(kv, first, [first, 1, 2, 3])
        found = tree(kv)
        assert found[0].num_below == 40 and len(found) == 1 + MAX_CHILDREN
        for number in range(30):
            run(kv, number, [1, 1, 1, 1], salt=f"salt {number}")
        spaces = PrefixTree(1000)
        spaces.add(kv, section=0)
        assert sum(one.parent < 0 for one in spaces.prefixes) == MAX_SPACES
        assert spaces.num_hidden == 31 - MAX_SPACES

    def test_at_most_so_many_and_parents_first(self) -> None:
        kv = cache(num_blocks=300)
        rng = random.Random(1)
        for owner in range(60):
            run(kv, owner, [rng.randrange(2) for _ in range(16)])
        for limit in (2, 5, 50):
            found = tree(kv, max_prefixes=limit)
            assert len(found) == limit
            assert all(one.parent < at for at, one in enumerate(found))
            for one in found[1:]:
                above = found[one.parent]
                assert one.start == above.start + above.num_tokens
