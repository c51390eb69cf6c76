"""A small cache and the whole life of one prompt, for the tests of this room."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.kvcache.manager import KvCache
from headrace.kvcache.settings import CacheSettings
from headrace.seam import GroupSpec, PoolSizes
from tests.kvcache.sim import groups

B = 4


def make(
    num_blocks: int | tuple[int, ...] = 40,
    *,
    num_groups: int = 1,
    specs: tuple[GroupSpec, ...] = (),
    host: tuple[int, ...] = (),
    disk: tuple[int, ...] = (),
    folder: str = "",
    **settings: Any,
) -> KvCache:
    specs = specs or groups(num_groups)
    counts = (num_blocks,) * len(specs) if isinstance(num_blocks, int) else num_blocks
    chosen = CacheSettings(**{"tokens_per_block": B, "partial_reuse": False, **settings})
    return KvCache(specs, PoolSizes(counts, 8, host, disk, folder), chosen)


def serve(kv: KvCache, owner: int, tokens: list[int], *, salt: str = "", end: bool = True) -> int:
    """One prompt from admission to its last token; returns the tokens reused."""
    num_reused = kv.admit(owner, tokens, claim=kv.claim(salt=salt))
    assert kv.extend(owner, len(tokens))
    kv.commit(owner, tokens, len(tokens))
    if end:
        kv.release(owner)
    kv.check()
    return num_reused


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()
