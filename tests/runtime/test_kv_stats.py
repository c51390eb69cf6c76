from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.kvcache.manager import KvCache
from headrace.kvcache.settings import CacheSettings
from headrace.kvcache.stats import CacheStats
from headrace.runtime.kv_stats import KvStats
from headrace.seam import GroupSpec, PoolSizes

FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=64)
WINDOW = GroupSpec((1,), 1, 8, "float32", window=8, bytes_per_token=32)
SIZE = 4


def cache(*groups: GroupSpec, host: int = 0, num: int = 21, **settings: Any) -> KvCache:
    sizes = PoolSizes((num,) * len(groups), 8, host_blocks=(host,) * len(groups) if host else ())
    return KvCache(groups, sizes, CacheSettings(tokens_per_block=SIZE, **settings))


def stats_of(kv: KvCache, *, interval: int = 1) -> KvStats:
    return KvStats(kv.groups, max_seq_len=100, tokens_per_block=SIZE, interval=interval)


def run(kv: KvCache, owner: int, tokens: list[int], *, num_generated: int = 0) -> int:
    claim = kv.claim(prompt_len=len(tokens))
    cached = kv.admit(owner, tokens, claim=claim)
    whole = tokens + [9] * num_generated
    assert kv.extend(owner, len(tokens)) and kv.extend(owner, len(whole))
    kv.commit(owner, whole, len(whole))
    kv.release(owner, tokens=whole, num_computed=len(whole), final=True)
    for move in kv.take_copies().tolist():
        kv.finish_copies([move[0]])
    return cached


def entry(stats: KvStats, *kvs: KvCache, key: str = "100") -> dict[str, Any]:
    found = stats.iteration([kv.stats for kv in kvs])
    assert found is not None
    return found[key]


def test_each_entry_counts_what_happened_since_the_last() -> None:
    kv = cache(FULL)
    stats = stats_of(kv)
    prompt = list(range(1, 11))  # 2 blocks and a half
    assert run(kv, 1, prompt, num_generated=6) == 0
    first = entry(stats, kv)
    assert (first["iterMissedBlocks"], first["iterReusedBlocks"]) == (3, 0)
    assert (first["iterAllocBlocks"], first["iterGenAllocBlocks"]) == (4, 1)
    assert first["iterCachedTokensByLevel"] == [0] and first["kvCacheLevelTiers"] == ["DEVICE"]
    assert (first["primaryMaxNumBlocks"], first["primaryUsedNumBlocks"]) == (20, 0)
    assert (first["secondaryMaxNumBlocks"], first["secondaryUsedNumBlocks"]) == (0, 0)

    assert run(kv, 2, prompt) == 9, "the last token is always computed"
    second = entry(stats, kv)
    assert (second["iterFullReusedBlocks"], second["iterPartialReusedBlocks"]) == (2, 1)
    assert (second["iterReusedBlocks"], second["iterMissedBlocks"]) == (3, 0)
    assert second["iterCachedTokensByLevel"] == [9]
    assert second["iterIntraDeviceCopyBytes"] == FULL.block_bytes(SIZE), "the partial block was copied"

    third = entry(stats, kv)
    assert {
        value for name, value in third.items() if name.startswith("iter") and name != "iterCachedTokensByLevel"
    } == {0}


def test_totals_and_reasons_of_misses() -> None:
    kv = cache(FULL)
    stats = stats_of(kv)
    prompt = list(range(1, 11))
    run(kv, 1, prompt)
    run(kv, 2, prompt)
    kv.admit(3, prompt, claim=kv.claim(salt="another", prompt_len=10))
    kv.extend(3, 10)
    totals = stats.totals([kv.stats])
    assert totals["reusedTokens"] == 9 and totals["cacheHitRate"] == 9 / 30
    assert totals["missedTokens"] == {"noPrefix": 10, "evicted": 0, "granularity": 1, "salt": 10}
    assert totals["usedNumBlocks"] == 3
    assert totals["maxNumBlocks"] == totals["freeNumBlocks"] + totals["cachedNumBlocks"] + totals["usedNumBlocks"]
    assert totals["allocTotalBlocks"] == totals["allocNewBlocks"] + totals["reusedBlocks"]


def test_only_every_so_many_steps() -> None:
    kv = cache(FULL)
    stats = stats_of(kv, interval=3)
    run(kv, 1, list(range(1, 11)))
    assert stats.iteration([kv.stats]) is None
    run(kv, 2, list(range(101, 111)))
    assert stats.iteration([kv.stats]) is None
    assert entry(stats, kv)["iterMissedBlocks"] == 6, "nothing in between is lost"


def test_an_entry_for_each_window() -> None:
    kv = cache(FULL, WINDOW, replace(WINDOW, layers=(2,), num_kv_heads=2))
    stats = stats_of(kv)
    run(kv, 1, list(range(1, 11)))
    found = stats.iteration([kv.stats])
    assert found is not None and set(found) == {"100", "8"}
    assert found["100"]["iterMissedBlocks"] == 3
    assert found["8"]["iterMissedBlocks"] == 6, "two groups have this window"
    assert found["8"]["primaryMaxNumBlocks"] == 40
    assert found["8"]["iterCachedTokensByLevel"] == [0]


def test_sections_add_up() -> None:
    one, two = cache(FULL), cache(FULL)
    stats = stats_of(one)
    run(one, 1, list(range(1, 11)))
    run(two, 1, list(range(1, 11)))
    run(two, 2, list(range(1, 11)))
    found = entry(stats, one, two)
    assert found["iterMissedBlocks"] == 6 and found["iterReusedBlocks"] == 3
    assert found["primaryMaxNumBlocks"] == 40


def test_offload_and_onboard_in_bytes() -> None:
    kv = cache(FULL, num=6, host=20)
    stats = stats_of(kv)
    prompt = list(range(1, 17))  # 4 blocks of 5
    run(kv, 1, prompt)
    run(kv, 2, list(range(101, 117)))
    first = entry(stats, kv)
    block = FULL.block_bytes(SIZE)
    assert first["iterOffloadBytes"] > 0 and first["iterOffloadBytes"] % block == 0
    assert first["secondaryMaxNumBlocks"] == 19
    assert first["secondaryUsedNumBlocks"] == first["iterOffloadBytes"] // block
    assert first["kvCacheLevelTiers"] == ["DEVICE", "HOST"]
    cached = run(kv, 3, prompt)
    second = entry(stats, kv)
    on_device, on_host = second["iterCachedTokensByLevel"]
    assert on_device + on_host == cached > 0
    assert on_host > 0 and second["iterOnboardBytes"] == -(-on_host // SIZE) * block
    assert isinstance(kv.stats, CacheStats)
