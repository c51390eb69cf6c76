from __future__ import annotations

import pytest

from tests.kvcache.cases import B, make, prompt, serve
from tests.kvcache.sim import block_keys


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 5 * B - 1, 5 * B, 5 * B + 1])
def test_the_last_prompt_token_is_always_recomputed(length: int):
    kv = make()
    tokens = prompt(length)
    assert kv.match(tokens) == serve(kv, 1, tokens) == 0
    for owner in (2, 3):
        assert kv.match(tokens) == (length - 1) // B * B
        assert serve(kv, owner, tokens) == (length - 1) // B * B < length
    assert kv.stats.num_cached == (length // B,)
    assert kv.stats.num_leased == (0,)


def test_blocks_of_a_running_owner_are_found_once_they_are_full():
    kv = make()
    tokens = prompt(3 * B)
    kv.admit(1, tokens)
    assert kv.extend(1, len(tokens))
    for num_computed, found in ((1, 0), (B - 1, 0), (B, 1), (2 * B - 1, 1), (2 * B, 2)):
        kv.commit(1, tokens, num_computed)
        assert kv.match(tokens) == found * B, num_computed
    assert kv.admit(2, tokens) == 2 * B
    assert kv.table(2) == kv.table(1)[:2]
    kv.check()
    kv.release(1)
    assert kv.stats.num_leased == (2,)
    kv.check()


def test_what_was_not_computed_is_not_found():
    kv = make()
    tokens = prompt(3 * B)
    kv.admit(1, tokens)
    assert kv.extend(1, len(tokens))
    kv.commit(1, tokens, B + 1)
    kv.release(1)
    assert kv.match(tokens) == B
    assert kv.stats.num_free == (38,)


def test_generated_tokens_are_found_too():
    kv = make()
    tokens = prompt(B + 1)
    kv.admit(1, tokens)
    assert kv.extend(1, len(tokens))
    kv.commit(1, tokens, len(tokens))
    for token in range(2 * B):
        tokens.append(token)
        assert kv.extend(1, len(tokens))
        kv.commit(1, tokens, len(tokens) - 1)
    kv.release(1)
    assert kv.match([*tokens, 1]) == len(tokens) // B * B


@pytest.mark.parametrize("first, second", [("", "a"), ("a", ""), ("a", "b"), ("a", "aa")])
def test_salts_isolate(first: str, second: str):
    kv = make()
    tokens = prompt(3 * B + 1)
    serve(kv, 1, tokens, salt=first)
    assert kv.match(tokens, claim=kv.claim(salt=second)) == 0
    assert serve(kv, 2, tokens, salt=second) == 0
    assert kv.match(tokens, claim=kv.claim(salt=first)) == kv.match(tokens, claim=kv.claim(salt=second)) == 3 * B
    assert serve(kv, 3, tokens, salt=first) == 3 * B


def test_match_limit_and_no_side_effects():
    kv = make()
    tokens = prompt(4 * B)
    serve(kv, 1, tokens)
    serve(kv, 2, prompt(4 * B, 1))
    before = block_keys(kv, 0)
    assert [kv.match(tokens, limit=limit) for limit in (0, B - 1, B, 2 * B + 1, 99)] == [0, 0, B, 2 * B, 3 * B]
    assert kv.match([]) == 0
    assert block_keys(kv, 0) == before and kv.stats.lookups == 2


def test_reuse_off_is_off():
    kv = make(reuse=False)
    tokens = prompt(3 * B)
    for owner in (1, 2):
        assert serve(kv, owner, tokens) == 0
    assert kv.match(tokens) == 0
    stats = kv.stats
    assert (stats.num_cached, stats.num_free, stats.lookups, stats.hit_rate) == ((0,), (39,), 0, 0.0)
    assert kv.index.num_nodes == 0


def test_an_owner_without_reuse_still_feeds_the_index():
    kv = make()
    tokens = prompt(2 * B + 1)
    serve(kv, 1, tokens)
    assert kv.admit(2, tokens, reuse=False) == 0
    assert kv.extend(2, len(tokens))
    kv.commit(2, tokens, len(tokens))
    kv.release(2)
    kv.check()
    assert kv.match(tokens) == 2 * B
    assert kv.stats.num_cached == (2,)


def test_the_same_tokens_computed_twice_stay_one_block_in_the_index():
    kv = make()
    tokens = prompt(2 * B + 1)
    for owner in (1, 2):
        kv.admit(owner, tokens)
        assert kv.extend(owner, len(tokens))
    kv.commit(1, tokens, len(tokens))
    before = kv.table(2)
    kv.commit(2, tokens, len(tokens))
    assert kv.table(2) == before, "tables never change under a step in flight"
    assert kv.stats.num_leased == (6,)
    kv.check()
    kv.release(2)
    kv.release(1)
    kv.check()
    assert kv.stats.num_cached == (2,)


def test_a_block_computed_again_takes_the_place_of_an_unused_one():
    kv = make()
    tokens = prompt(2 * B)
    serve(kv, 1, tokens)
    serve(kv, 2, tokens, end=False)
    assert kv.stats.num_cached == (0,) and kv.stats.num_leased == (2,)


def test_eviction_is_least_recently_used_and_leaves_go_first():
    kv = make(9)
    old, new = prompt(4 * B, 1), prompt(4 * B, 2)
    serve(kv, 1, old)
    serve(kv, 2, new)
    assert block_keys(kv, 0)[:4] == [("", tuple(old[:end])) for end in range(4 * B, 0, -B)]
    assert kv.admit(3, [*old, 1]) == 4 * B
    kv.release(3)
    kv.admit(4, [7])
    assert kv.extend(4, 3 * B)
    assert kv.match([*old, 1]) == 4 * B and kv.match([*new, 1]) == B
    assert kv.stats.evictions == 3
    kv.check()


def test_a_shared_prefix_outlives_its_branches():
    kv = make(11)
    stem = prompt(3 * B)
    for owner in range(2):
        serve(kv, owner, [*stem, *prompt(2 * B, owner + 1)])
    kv.admit(9, [7])
    assert kv.extend(9, 7 * B)
    assert kv.match([*stem, 1]) == 3 * B
    assert kv.stats.num_cached == (3,)


def test_pressure_never_touches_leased_blocks():
    kv = make(9)
    tokens = prompt(4 * B)
    serve(kv, 1, tokens, end=False)
    mine = kv.table(1)
    for owner in range(2, 30):
        serve(kv, owner, prompt(4 * B, owner))
        assert kv.table(1) == mine and not set(mine) & set(kv.pools[0].eviction_order())
    assert kv.match([*tokens, 1]) == 4 * B
    kv.admit(99, [5])
    assert not kv.extend(99, 5 * B)
    assert kv.table(99) == []
    kv.check()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_with_only_evictable_blocks_left_a_new_owner_always_gets_in(num_groups: int):
    kv = make(9, num_groups=num_groups)
    for owner in range(4):
        serve(kv, owner, prompt(8 * B, owner))
    assert kv.stats.num_free == (0,) * num_groups and kv.stats.num_cached == (8,) * num_groups
    for owner, tokens in enumerate((prompt(8 * B, 3), prompt(8 * B, 50), prompt(8 * B - 1, 3)), 10):
        assert kv.can_admit(tokens, num_tokens=8 * B)
        assert not kv.can_admit(tokens, num_tokens=8 * B + 1)
        kv.admit(owner, tokens)
        assert kv.extend(owner, 8 * B)
        assert not kv.extend(owner, 8 * B + 1)
        kv.commit(owner, tokens, len(tokens))
        kv.release(owner)
        kv.check()


def test_can_admit_counts_shared_blocks_once():
    kv = make(9)
    tokens = prompt(6 * B)
    serve(kv, 1, tokens, end=False)
    same = [*tokens[: 5 * B], 1]
    assert kv.num_available() == 2
    assert kv.can_admit(same, num_tokens=7 * B)
    assert kv.can_admit(same, num_tokens=6 * B, headroom=1)
    assert not kv.can_admit(same, num_tokens=6 * B, headroom=2)
    assert not kv.can_admit(same, num_tokens=7 * B, reuse=False)
    assert not kv.can_admit(same, num_tokens=7 * B, claim=kv.claim(salt="x"))
    assert not kv.can_admit(prompt(5 * B + 1, 9), num_tokens=5 * B + 1)


def test_extend_is_all_or_nothing_over_groups():
    kv = make((9, 4), num_groups=2)
    kv.admit(1, [1])
    assert not kv.extend(1, 4 * B)
    assert kv.stats.num_free == (8, 3) and kv.num_tokens_capacity(1) == 0
    assert kv.extend(1, 3 * B)
    assert (kv.num_available(), kv.num_tokens_capacity(1)) == (0, 3 * B)
    kv.check()


def test_a_prefix_needs_its_block_in_every_group():
    kv = make((20, 5), num_groups=2)
    tokens = prompt(3 * B)
    serve(kv, 1, tokens)
    serve(kv, 2, prompt(3 * B, 1))
    assert kv.stats.num_cached == (6, 4)
    assert kv.match([*tokens, 1]) == B
    assert serve(kv, 3, [*tokens, 1]) == B
    assert kv.match([*tokens, 1]) == 3 * B, "the holes are filled again"


def test_take_new_blocks_reports_each_block_once():
    kv = make(num_groups=2)
    tokens = prompt(2 * B + 1)
    serve(kv, 1, tokens)
    kv.admit(2, tokens)
    assert kv.extend(2, 2 * B + 1)
    new = kv.take_new_blocks({2: 5})
    assert new == [[v for at in range(3) for v in (5, at, kv.table(2, group)[at])] for group in range(2)]
    assert kv.extend(2, 3 * B) and kv.take_new_blocks({2: 5}) == [[], []]
    assert kv.extend(2, 3 * B + 1)
    kv.admit(3, tokens)
    assert kv.take_new_blocks({2: 5, 3: 0}) == [
        [5, 3, kv.table(2, group)[3], 0, 0, kv.table(3, group)[0], 0, 1, kv.table(3, group)[1]] for group in range(2)
    ]


def test_statistics_count_tokens_and_blocks():
    kv = make(num_groups=2)
    tokens = prompt(2 * B + 1)
    serve(kv, 1, tokens)
    serve(kv, 2, tokens)
    stats = kv.stats
    assert (stats.lookups, stats.hit_tokens, stats.miss_tokens) == (2, 2 * B, 2 * B + 2)
    assert (stats.allocated_blocks, stats.reused_blocks, stats.missed_blocks) == (8, 4, 8)
    assert stats.hit_rate == pytest.approx(2 * B / (4 * B + 2))
    assert stats.num_total == (39, 39) and stats.num_cached == (2, 2) and stats.num_free == (37, 37)


def test_commit_reads_only_new_blocks():
    kv = make()
    tokens = prompt(3 * B)
    serve(kv, 1, tokens[: 2 * B], end=False)
    assert kv.extend(1, 3 * B)
    kv.commit(1, [-1] * 2 * B + tokens[2 * B :], 3 * B)
    assert kv.match([*tokens, 1]) == 3 * B
    with pytest.raises(AssertionError):
        kv.commit(1, [*tokens, *tokens], 6 * B)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens_per_block": 24}, "tokens_per_block is 24"),
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"num_blocks": (5, 5)}, "num_blocks has 2 entries for 1"),
        ({"num_blocks": (1,)}, "2 or more"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        make(**{"num_blocks": (9,), **change})
