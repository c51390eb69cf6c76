"""A small cache and the whole life of one prompt, for the tests of this room."""

from __future__ import annotations

import numpy as np

from headrace.kvcache.manager import KvCache
from tests.kvcache.sim import groups

B = 4


def make(num_blocks: int = 40, *, num_groups: int = 1, reuse: bool = True) -> KvCache:
    return KvCache(groups(num_groups), tokens_per_block=B, num_blocks=(num_blocks,) * num_groups, reuse=reuse)


def serve(kv: KvCache, owner: int, tokens: list[int], *, salt: str = "", end: bool = True) -> int:
    """One prompt from admission to its last token; returns the tokens reused."""
    num_reused = kv.admit(owner, tokens, salt=salt)
    assert kv.extend(owner, len(tokens))
    kv.commit(owner, tokens, len(tokens))
    if end:
        kv.release(owner)
    kv.check()
    return num_reused


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()
