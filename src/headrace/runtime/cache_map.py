"""The map of the KV cache, over all sections."""

from __future__ import annotations

from headrace import wire
from headrace.kvcache.overview import MAX_SCANNED, PrefixTree, pool_maps
from headrace.scheduler.scheduler import Scheduler


def cache_map(scheduler: Scheduler, wanted: wire.GetCacheMap) -> wire.CacheMap:
    sections = scheduler.sections
    tree = PrefixTree(
        wanted.max_prefixes, salt=wanted.salt, with_others=wanted.with_others, max_tokens=wanted.max_tokens
    )
    pools: list[wire.PoolMap] = []
    for number, section in enumerate(sections):
        pools += pool_maps(
            section.kv,
            section=number,
            max_cells=wanted.max_cells // len(sections),
            max_scanned=MAX_SCANNED // len(sections),
        )
        tree.add(section.kv, section=number)
    return wire.CacheMap(pools=pools, prefixes=tree.prefixes, num_hidden=tree.num_hidden)
