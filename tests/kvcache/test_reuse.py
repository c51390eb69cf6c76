"""The longest reusable prefix against the definition, in words and by brute force."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.radix import NONE
from headrace.kvcache.reuse import blocks_in_flight, is_copy_cheaper, longest, most_at_rest
from headrace.seam import GroupSpec

B = 4
FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=1)
STATE = GroupSpec((0,), 0, 0, "float32", state_bytes=8)


def window(size: int, sink: int = 0) -> GroupSpec:
    return GroupSpec((0,), 1, 8, "float32", window=size, bytes_per_token=1, sink_tokens=sink)


def reachable(spec: GroupSpec, query: int) -> set[int]:
    """Blocks that hold a token which the query at this position, or a later one, reads before itself."""
    if spec.window is None:
        return {token // B for token in range(query)}
    near = {token // B for token in range(max(0, query - spec.window + 1), query)}
    return near | {token // B for token in range(min(spec.sink_tokens, query))}


def is_reusable(spec: GroupSpec, there: list[bool], length: int) -> bool:
    if not length:
        return True
    if spec.is_recurrent:
        return there[length - 1]
    return all(there[block] for block in reachable(spec, length * B))


specs = st.one_of(
    st.just(FULL), st.just(STATE), st.builds(window, st.integers(1, 14), st.sampled_from([0, 0, 1, 4, 5]))
)


@settings(max_examples=400, deadline=None)
@given(st.data(), st.lists(specs, min_size=1, max_size=3), st.integers(0, 9))
def test_longest_is_the_longest(data: st.DataObject, groups: list[GroupSpec], length: int) -> None:
    there = [[[data.draw(st.booleans()) for _ in range(length)] for _ in range(2)] for _ in groups]  # by group and tier
    names = [tuple([[7 if known else NONE for known in tier] for tier in tiers]) for tiers in there]
    either = [[any(at) for at in zip(*tiers)] for tiers in there]
    best = max(n for n in range(length + 1) if all(is_reusable(spec, it, n) for spec, it in zip(groups, either)))
    assert longest(list(range(length)), list(zip(groups, names)), B) == best


sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20), sequences, st.sampled_from([0, 1, 5]))
def test_rest_and_flight_cover_what_is_in_reach(size: int, each: list[tuple[int, int]], sink: int) -> None:
    """Of one sequence and of several: (computed tokens, tokens in flight)."""
    spec = window(size, sink)
    held = [len(reachable(spec, at) | {token // B for token in range(at, at + count)}) for at, count in each]
    rest, total = most_at_rest(spec, B), sum(count for _, count in each)
    assert sum(held) <= len(each) * rest + blocks_in_flight(total, B)
    assert sum(max(count - rest, 0) for count in held) <= blocks_in_flight(total, B)


def test_bounds_by_hand() -> None:
    assert most_at_rest(FULL, B) == sys.maxsize and most_at_rest(STATE, B) == 0
    assert most_at_rest(window(9), B) == 4 and most_at_rest(window(9, 5), B) == 6
    assert blocks_in_flight(11, B) == 2


def test_copying_is_worth_it_when_it_is_faster() -> None:
    assert is_copy_cheaper(1000, 10, copy_bytes_per_s=0.0, tokens_per_s=5.0)
    assert is_copy_cheaper(1000, 10, copy_bytes_per_s=101.0, tokens_per_s=1.0)
    assert not is_copy_cheaper(1000, 10, copy_bytes_per_s=99.0, tokens_per_s=1.0)
