"""Blocks reused in part, suffixes of what has ended, and why a prompt misses."""

from __future__ import annotations

import pytest

from headrace.kvcache.manager import KvCache
from tests.kvcache.cases import B, make, prompt, serve


def end(kv: KvCache, owner: int, tokens: list[int]) -> int:
    """A whole life, its partly filled last block included."""
    found = serve(kv, owner, tokens, end=False)
    kv.release(owner, tokens=tokens, num_computed=len(tokens))
    kv.check()
    return found


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("shared", range(1, 3 * B))
def test_any_common_prefix_is_reused(shared: int, num_groups: int) -> None:
    kv = make(num_groups=num_groups, partial_reuse=True)
    tokens = prompt(3 * B)
    end(kv, 1, tokens)
    other = [*tokens[:shared], 2000, 2001]
    assert kv.match(other) == shared == kv.admit(2, other)
    kv.check()
    copies = kv.take_copies().tolist()
    assert len(copies) == (num_groups if shared % B else 0)
    for _, group, tier, source, to_tier, target in copies:
        assert (tier, to_tier) == (0, 0) and target == kv.table(2, group)[-1] != source
        assert source not in kv.table(2, group)
    assert not kv.copies_in_flight, "an ordered copy within the device needs nobody's patience"
    assert kv.extend(2, len(other))
    kv.commit(2, other, len(other))
    kv.release(2)
    kv.check()
    assert kv.match([*tokens, 1]) == 3 * B


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1])
def test_the_same_prompt_again_computes_its_last_token_only(length: int) -> None:
    kv = make(partial_reuse=True)
    tokens = prompt(length)
    assert end(kv, 1, tokens) == 0
    assert end(kv, 2, tokens) == end(kv, 3, tokens) == length - 1
    assert kv.stats.num_leased == (0,)


def test_the_child_that_shares_most_is_taken() -> None:
    kv = make(partial_reuse=True)
    stem = prompt(B)
    for owner, tail in enumerate(([1, 2, 3, 4], [1, 2, 9, 9], [5, 2, 3, 4])):
        end(kv, owner, [*stem, *tail])
    assert kv.match([*stem, 1, 2, 3, 9, 9]) == B + 3
    assert kv.match([*stem, 1, 2, 9, 1, 1]) == B + 3
    assert kv.match([*stem, 5, 1, 1]) == B + 1
    assert kv.match([*stem, 6, 2, 3]) == B


def test_a_block_of_a_running_owner_is_copied() -> None:
    kv = make(partial_reuse=True)
    tokens = prompt(2 * B)
    serve(kv, 1, tokens, end=False)
    assert kv.admit(2, [*tokens[: B + 2], 2000]) == B + 2
    assert kv.table(2)[0] == kv.table(1)[0] and kv.table(2)[1] != kv.table(1)[1]
    kv.check()


def test_without_copies_an_idle_block_is_taken_over() -> None:
    kv = make(partial_reuse=True, copy_on_partial_reuse=False)
    tokens = prompt(2 * B)
    serve(kv, 1, tokens, end=False)
    other = [*tokens[: B + 2], 2000]
    assert kv.match(other) == B, "somebody holds it"
    block = kv.table(1)[1]
    kv.release(1)
    assert kv.match(other) == B + 2 == kv.admit(2, other)
    kv.check()
    assert kv.table(2)[1] == block and not len(kv.take_copies())
    assert kv.match([*tokens, 1]) == B


def test_the_only_block_left_is_taken_over() -> None:
    kv = make(3, partial_reuse=True)
    tokens = prompt(2 * B)
    end(kv, 1, tokens)
    other = [*tokens[: B + 2], 2000]
    assert kv.can_admit(other, num_tokens=2 * B)
    assert kv.admit(2, other) == B + 2
    kv.check()
    assert not len(kv.take_copies())


def test_off_is_off() -> None:
    kv = make()
    tokens = prompt(2 * B)
    end(kv, 1, [*tokens, 1])
    assert kv.match([*tokens[: B + 2], 2000]) == B
    assert kv.stats.num_cached == (2,), "no suffix either"
    off = make(reuse=False, partial_reuse=True)
    assert end(off, 1, tokens) == end(off, 2, tokens) == 0 and off.index.num_nodes == 0


def test_a_suffix_is_named_once() -> None:
    kv = make(partial_reuse=True)
    tokens = prompt(B + 2)
    for owner in range(3):
        end(kv, owner, tokens)
    end(kv, 9, tokens[: B + 1])
    assert kv.stats.num_cached == (2,)


def test_statistics_of_partial_hits() -> None:
    kv = make(partial_reuse=True)
    tokens = prompt(2 * B)
    end(kv, 1, tokens)
    end(kv, 2, [*tokens[: B + 1], 2000])
    stats = kv.stats
    assert (stats.hit_tokens, stats.miss_tokens) == (B + 1, 2 * B + 1)
    assert (stats.reused_blocks, stats.partial_reused_blocks) == (2, 1)


@pytest.mark.parametrize(
    ("settings", "tokens", "salt", "reason"),
    [
        ({}, prompt(4 * B, 7), "", "no_prefix"),
        ({}, [*prompt(2 * B), *prompt(2 * B, 7)], "", "no_prefix"),
        ({}, prompt(2 * B), "x", "salt"),
        ({}, prompt(2 * B), "", "granularity"),
        ({"partial_reuse": True}, prompt(2 * B), "", "granularity"),
        ({}, [*prompt(2 * B), 1], "", "granularity"),
        ({}, prompt(B - 1), "", "granularity"),
        ({"partial_reuse": True}, [2000, 2001], "", "no_prefix"),
    ],
)
def test_a_miss_has_its_reason(settings: dict[str, bool], tokens: list[int], salt: str, reason: str) -> None:
    kv = make(**settings)
    end(kv, 1, prompt(2 * B))
    before = kv.stats
    found = serve(kv, 2, tokens, salt=salt)
    after = kv.stats
    missed = {
        name: getattr(after, f"miss_tokens_{name}") - getattr(before, f"miss_tokens_{name}")
        for name in ("no_prefix", "evicted", "granularity", "salt")
    }
    assert {name for name, count in missed.items() if count} == {reason}
    assert missed[reason] == len(tokens) - found == after.miss_tokens - before.miss_tokens


@pytest.mark.parametrize("gone", [2, 3, 4])
def test_what_was_evicted_is_told_from_what_never_was(gone: int) -> None:
    kv = make(5)
    tokens = prompt(4 * B)
    serve(kv, 1, tokens)
    kv.admit(2, [2000])
    assert kv.extend(2, gone * B)
    kv.release(2)
    serve(kv, 3, tokens)
    assert kv.stats.miss_tokens_evicted == gone * B
