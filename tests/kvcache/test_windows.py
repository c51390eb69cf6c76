"""Window groups: blocks leave while their owner runs, stay findable, and may be evicted in any order."""

from __future__ import annotations

import pytest

from headrace.kvcache.manager import KvCache
from headrace.seam import GroupSpec
from headrace.types import Retention, RetentionRange
from tests.kvcache.cases import B, make, prompt, serve

W = 6


def spec(window: int | None = None, *, sink: int = 0) -> GroupSpec:
    return GroupSpec((0,), 1, 8, "float32", window=window, bytes_per_token=4, sink_tokens=sink)


def grow(kv: KvCache, owner: int, tokens: list[int], *, first: int = 0) -> None:
    """Token by token, as decoding does."""
    for count in range(first + 1, len(tokens) + 1):
        assert kv.extend(owner, count)
        kv.commit(owner, tokens, count)
        kv.check()


def in_reach(length: int, *, sink: int = 0) -> list[bool]:
    """By block of a sequence of `length` computed tokens: whether the next query reads it."""
    near = range(max(0, length - W + 1), length)
    return [
        at * B < sink or any(token // B == at for token in near) or at == length // B for at in range(-(-length // B))
    ]


@pytest.mark.parametrize("sink", [0, 1, 5])
def test_entries_out_of_the_window_are_the_dummy_block(sink: int) -> None:
    kv = make((30, 30), specs=(spec(), spec(W, sink=sink)))
    tokens = prompt(7 * B)
    kv.admit(1, tokens[:1])
    for count in range(1, len(tokens) + 1):
        assert kv.extend(1, count)
        kv.commit(1, tokens, count)
        kv.check()
        held = [block > 0 for block in kv.table(1, 1)]
        assert held == in_reach(count, sink=sink)[: len(held)], count
        assert all(kv.table(1, 0))
    kv.release(1)
    kv.check()
    assert kv.stats.num_leased == (0, 0) and kv.stats.num_cached == (7, 7)


def test_the_engine_hears_of_entries_that_left() -> None:
    kv = make(30, specs=(spec(W),))
    tokens = prompt(4 * B)
    kv.admit(1, tokens[:1])
    assert kv.extend(1, 3 * B)
    kv.take_new_blocks({1: 0})
    assert not kv.has_left(1)
    kv.commit(1, tokens, 3 * B)  # tokens 7 and on are in reach
    assert kv.has_left(1) and kv.take_new_blocks({1: 3}) == [[3, 0, 0]]
    assert not kv.has_left(1) and kv.take_new_blocks({1: 3}) == [[]]


def test_a_long_sequence_runs_in_a_small_window_pool() -> None:
    kv = make((30, 4), specs=(spec(), spec(W)))
    tokens = prompt(28 * B)
    kv.admit(1, tokens[:1])
    grow(kv, 1, tokens)
    assert kv.stats.num_leased[1] == 2


def test_a_prefix_is_found_without_what_is_out_of_reach() -> None:
    kv = make((30, 10), specs=(spec(), spec(W)))
    tokens = prompt(6 * B)
    serve(kv, 1, tokens)
    nodes = kv.index.walk(kv.claim().space, tokens, 6)[0]
    for at in (0, 2, 1):  # any of them, not the leaves first
        kv.store.unname(1, nodes[at])
        kv.check()
    assert kv.match([*tokens, 1]) == 6 * B
    assert kv.admit(2, [*tokens, 1]) == 6 * B
    assert [block > 0 for block in kv.table(2, 1)] == [False] * 4 + [True] * 2
    assert all(kv.table(2, 0))
    kv.release(2)
    kv.check()


def test_a_hole_in_the_window_shortens_the_match() -> None:
    kv = make((30, 20), specs=(spec(), spec(W)))
    tokens = prompt(6 * B)
    serve(kv, 1, tokens)
    nodes = kv.index.walk(kv.claim().space, tokens, 6)[0]
    kv.store.unname(1, nodes[4])
    assert kv.match([*tokens, 1]) == 4 * B  # 5 and 6 blocks reach back into block 4
    kv.store.unname(1, nodes[3])
    assert kv.match([*tokens, 1]) == 3 * B
    kv.store.unname(0, nodes[0])
    assert kv.match([*tokens, 1]) == 0


def test_sinks_are_needed_for_a_match() -> None:
    kv = make((30, 20), specs=(spec(), spec(W, sink=B + 1)))
    tokens = prompt(6 * B)
    serve(kv, 1, tokens)
    assert kv.admit(2, [*tokens, 1]) == 6 * B
    assert [block > 0 for block in kv.table(2, 1)] == [True, True, False, False, True, True]
    kv.release(2)
    nodes = kv.index.walk(kv.claim().space, tokens, 6)[0]
    kv.store.unname(1, nodes[1])
    assert kv.match([*tokens, 1]) == B


def test_admission_promises_each_group_its_worst_case() -> None:
    rest, in_flight = -(-(W - 1) // B) + 2, 2
    kv = make((100, 1 + 2 * rest + in_flight), specs=(spec(), spec(W)), max_tokens_in_flight=in_flight * B)
    assert kv.max_tokens() == 99 * B
    for owner in range(2):
        assert kv.can_admit([owner], num_tokens=40 * B)
        kv.admit(owner, [owner], limit=40 * B)
        kv.check()
    assert kv.promises.promised == [80, 2 * rest] and kv.promises.spare(1) == 0
    assert not kv.can_admit([9], num_tokens=3)
    tokens = prompt(40 * B)
    for count in range(1, len(tokens) + 1):
        for owner in range(2):
            assert kv.extend(owner, min(count + 3, len(tokens)))
            kv.commit(owner, [owner, *tokens[1:]], count)
        kv.check()
    kv.release(0)
    assert kv.can_admit([9], num_tokens=3)
    kv.release(1)
    assert kv.promises.promised == kv.promises.beyond == kv.promises.taken == [0, 0]


def test_tokens_in_flight_are_promised_once() -> None:
    """Prompts of many chunks take turns in the step's tokens: together they run in a pool that neither fills alone."""
    size, rest = 6 * B, -(-(W - 1) // B) + 2
    kv = make((200, 1 + 3 * rest + 6), specs=(spec(), spec(W)), max_tokens_in_flight=size)
    whole = {owner: [owner, *prompt(30 * B, owner)] for owner in range(3)}
    for owner, tokens in whole.items():
        assert kv.can_admit(tokens, num_tokens=len(tokens))
        kv.admit(owner, tokens, limit=len(tokens))
    assert not kv.can_admit([9], num_tokens=2)
    for end in range(size, 31 * B, size):
        for owner, tokens in whole.items():
            assert kv.extend(owner, end)
            kv.check()
            kv.commit(owner, tokens, end)
    assert kv.promises.taken == [0, 0]
    for owner in whole:
        kv.release(owner)
    kv.check()
    assert kv.promises.spare(1) == 3 * rest + 6


def test_a_growing_owner_takes_what_is_there_and_gives_it_back() -> None:
    kv = make((100, 30), specs=(spec(), spec(W)), max_tokens_in_flight=12 * B)
    tokens = prompt(40 * B)
    kv.admit(1, tokens[:2], limit=3, grows=True)
    assert kv.extend(1, 12 * B) and kv.promises.taken[1] == 12 - 4
    kv.check()
    kv.commit(1, tokens, 12 * B)
    kv.check()
    assert kv.promises.taken[1] == 0 and kv.promises.promised == [0, 2]  # what it holds at rest stays its own


def test_shared_window_blocks_do_not_break_promises() -> None:
    """Both run to their end although what one gives back stays held by the other."""
    kv = make((100, 11), specs=(spec(), spec(W)), max_tokens_in_flight=8)
    tokens = prompt(5 * B)
    serve(kv, 9, tokens)
    ends = {owner: [*tokens, owner, *prompt(10 * B, owner)] for owner in (1, 2)}
    for owner, whole in ends.items():
        assert kv.can_admit(whole[: 5 * B + 1], num_tokens=len(whole))
        assert kv.admit(owner, whole[: 5 * B + 1], limit=len(whole)) == 5 * B
        kv.check()
    for owner in (2, 1):
        for count in range(5 * B + 1, len(ends[owner]) + 1):
            assert kv.extend(owner, min(count + 3, len(ends[owner])))
            kv.commit(owner, ends[owner], count)
            kv.check()


@pytest.mark.parametrize(("num_blocks", "limit"), [((9, 9), 8 * B), ((20, 6), 19 * B), ((20, 4), 3 * B)])
def test_what_one_sequence_may_have(num_blocks: tuple[int, ...], limit: int) -> None:
    kv = make(num_blocks, specs=(spec(), spec(W)), max_tokens_in_flight=4)
    assert kv.max_tokens() == limit
    assert kv.can_admit([1], num_tokens=limit) and not kv.can_admit([1], num_tokens=limit + 1)


def test_beams_keep_what_is_out_of_the_window() -> None:
    kv = make((30, 30), specs=(spec(), spec(W)))
    tokens = prompt(6 * B)
    kv.admit(1, tokens, slides=False)
    assert kv.extend(1, len(tokens))
    kv.commit(1, tokens, len(tokens))
    kv.fork(1, 2, len(tokens))
    kv.check()
    assert all(kv.table(1, 1)) and all(kv.table(2, 1)) and kv.commit_at(2) == 7 * B


def test_a_long_prompt_leaves_the_ends_of_others() -> None:
    """What it slides over goes first; where a prompt ends, or leaves what is known, stays in the order of use."""
    kv = make((200, 16), specs=(spec(), spec(W)), max_tokens_in_flight=B)
    ends = {owner: prompt(5 * B, owner) for owner in (1, 2, 3)}
    for owner, tokens in ends.items():
        kv.admit(owner, tokens)
        grow(kv, owner, tokens)
        kv.release(owner)
    long = prompt(60 * B, 9)
    kv.admit(9, long)
    grow(kv, 9, [*long, *prompt(10 * B, 8)])  # its answer slides over the end of its prompt
    assert [kv.match([*tokens, 1]) for tokens in ends.values()] == [5 * B] * 3
    assert kv.match([*long, 1]) == 60 * B and not kv.match(long[: 30 * B])
    kv.admit(10, [*long[: 30 * B], *prompt(20 * B, 7)])
    grow(kv, 10, [*long[: 30 * B], *prompt(20 * B, 7)])
    assert kv.match(long[: 30 * B + 1]) == 30 * B  # a second one left the path there: so may a third
    kv.release(9)
    kv.release(10)
    kv.check()


def test_what_was_told_to_stay_stays_in_order() -> None:
    kv = make((200, 12), specs=(spec(), spec(W)), max_tokens_in_flight=B)
    kept = Retention(ranges=(RetentionRange(0, 3 * B, 90),))
    tokens = prompt(20 * B)
    kv.admit(1, tokens, claim=kv.claim(retention=kept, prompt_len=len(tokens)))
    grow(kv, 1, tokens)
    assert kv.match(tokens[: 3 * B + 1]) == 3 * B
