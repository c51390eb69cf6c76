"""Forks, extra leases and failed work."""

from __future__ import annotations

import pytest

from headrace.kvcache.manager import NoBlocks
from tests.kvcache.cases import B, make, prompt, serve


@pytest.mark.parametrize("num_tokens", [B, 2 * B - 1, 2 * B, 2 * B + 1])
def test_fork_shares_full_blocks_and_copies_the_partial_one(num_tokens: int):
    kv = make(num_groups=2)
    tokens = prompt(num_tokens)
    serve(kv, 1, tokens, end=False)
    copies = kv.fork(1, 2, num_tokens)
    full, rest = divmod(num_tokens, B)
    assert [group for group, _, _ in copies] == ([0, 1] if rest else [])
    for group, source, target in copies:
        assert (source, target) == (kv.table(1, group)[full], kv.table(2, group)[full])
        assert source != target
    for group in range(2):
        assert kv.table(2, group)[:full] == kv.table(1, group)[:full]
    kv.check()
    child = [*tokens, *prompt(2 * B, 5)]
    assert kv.extend(2, len(child))
    kv.commit(2, child, len(child))
    kv.release(1)
    kv.check()
    kv.release(2)
    kv.check()
    assert kv.match([*child, 1]) == len(child) // B * B
    assert kv.stats.num_leased == (0, 0)


def test_fork_before_the_parent_has_committed():
    kv = make()
    tokens = prompt(3 * B)
    kv.admit(1, tokens)
    assert kv.extend(1, 3 * B)
    assert kv.fork(1, 2, 3 * B) == []
    kv.commit(2, tokens, 3 * B)
    kv.commit(1, tokens, 3 * B)
    kv.check()
    kv.release(2)
    kv.release(1)
    kv.check()
    assert kv.stats.num_cached == (3,)


def test_fork_without_a_block_changes_nothing():
    kv = make(3)
    serve(kv, 1, prompt(B + 1), end=False)
    before = kv.stats
    with pytest.raises(NoBlocks, match="owner 1"):
        kv.fork(1, 2, B + 1)
    assert kv.stats == before and 2 not in kv.tables
    assert kv.fork(1, 2, B) == []
    kv.check()


def test_extra_leases_hold_blocks_back():
    kv = make(4)
    serve(kv, 1, prompt(3 * B))
    first, *_, last = kv.pools[0].eviction_order()
    kv.store.lease(0, first)
    kv.store.lease(0, first)
    kv.admit(2, [1])
    assert not kv.extend(2, 3 * B) and kv.extend(2, 2 * B)
    kv.check()
    kv.store.unlease(0, first)
    assert kv.num_available() == 0
    kv.store.unlease(0, first)
    assert kv.num_available() == 1
    kv.check()
    for block in (first, last):
        with pytest.raises(AssertionError, match="no extra lease"):
            kv.store.unlease(0, block)


def test_failed_work_is_not_found_again():
    kv = make()
    stem, tail = prompt(2 * B), prompt(2 * B, 1)
    serve(kv, 1, stem)
    serve(kv, 2, stem + tail, end=False)
    assert kv.admit(3, [*stem, *tail, 1, 2]) == 4 * B
    kv.release(2, index=False)
    kv.check()
    assert kv.match([*stem, *tail, 1]) == 2 * B, "the stem wasn't computed by the owner that failed"
    on_top = [*stem, *tail, *prompt(B, 2)]
    assert kv.extend(3, len(on_top))
    kv.commit(3, on_top, len(on_top))
    kv.release(3)
    kv.check()
    assert kv.match([*on_top, 1]) == 2 * B
    serve(kv, 4, stem + tail)
    assert kv.match([*on_top, 1]) == 4 * B, "what stood on the failed blocks is gone, the new ones are found"
