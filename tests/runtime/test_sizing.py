from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.sizing import (
    Demand,
    Pools,
    longest_that_fits,
    pool_bytes,
    share_by_ratio,
    share_out,
    share_tier,
)
from headrace.seam import GroupSpec

BLOCK = 8
FULL = GroupSpec((0, 3), 2, 4, "float32", bytes_per_token=100)
WINDOW = GroupSpec((1,), 2, 4, "float32", window=20, bytes_per_token=50)
SINKS = GroupSpec((1,), 2, 4, "float32", window=20, bytes_per_token=50, sink_tokens=4)
STATES = GroupSpec((2,), 0, 0, "float32", state_bytes=3000)
DEMAND = Demand(tokens_per_block=BLOCK, max_tokens_in_flight=32, snapshot_interval=16)


def test_what_a_sequence_holds_at_a_time() -> None:
    assert [DEMAND.at_least(FULL, length) for length in (1, 8, 9, 800)] == [1, 1, 2, 100]
    bound = -(-(20 - 1) // BLOCK) + 2 + 32 // BLOCK
    assert [DEMAND.at_least(WINDOW, length) for length in (1, 16, 800)] == [1, 2, bound]
    assert DEMAND.at_least(SINKS, 800) == bound + 1
    assert DEMAND.at_least(STATES, 800) == 2 and DEMAND.wanted(STATES, 800) == 50
    off = Demand(tokens_per_block=BLOCK, max_tokens_in_flight=32)
    assert off.at_least(STATES, 800) == 1 and off.wanted(STATES, 800) == 0


def test_a_window_is_never_short_of_blocks() -> None:
    """Slide a window over a sequence by hand: the bound holds for every alignment."""
    for window in (1, 7, 8, 9, 20):
        group = GroupSpec((0,), 1, 4, "float32", window=window, bytes_per_token=4)
        bound = DEMAND.bound(group)
        for first_query in range(200):
            in_reach = range(max(0, first_query - window + 1), first_query + DEMAND.max_tokens_in_flight)
            held = {token // BLOCK for token in in_reach}
            assert bound is not None and len(held) <= bound


groups_drawn = st.lists(
    st.one_of(
        st.builds(lambda size: GroupSpec((0,), 1, 1, "x", bytes_per_token=size), st.integers(1, 90)),
        st.builds(
            lambda size, window, sinks: GroupSpec((0,), 1, 1, "x", window, bytes_per_token=size, sink_tokens=sinks),
            st.integers(1, 90),
            st.integers(1, 60),
            st.integers(0, 9),
        ),
        st.builds(lambda size: GroupSpec((0,), 0, 0, "x", state_bytes=size), st.integers(1, 5000)),
    ),
    min_size=1,
    max_size=4,
)


@given(
    groups=groups_drawn,
    budget=st.integers(0, 300_000),
    limit=st.integers(1, 500),
    average=st.integers(1, 500),
    interval=st.sampled_from([0, 8, 64]),
)
def test_shares_fit_and_the_longest_sequence_fits(
    groups: list[GroupSpec], budget: int, limit: int, average: int, interval: int
) -> None:
    demand = Demand(tokens_per_block=BLOCK, max_tokens_in_flight=24, snapshot_interval=interval)
    longest = longest_that_fits(groups, demand, budget, limit)
    if not longest:
        usable = [max(demand.at_least(group, 1), 1) for group in groups]
        assert pool_bytes(groups, usable, BLOCK) > budget
        return
    pools = share_out(groups, demand, budget, longest=longest, average=min(average, longest))
    assert pools.size_bytes == pool_bytes(groups, pools.usable, BLOCK) <= budget
    for group, count in zip(groups, pools.usable, strict=True):
        assert count >= max(demand.at_least(group, longest), 1)
    held = demand.tokens_held(groups, pools.usable)
    assert held is None or held >= longest
    assert demand.sequences_held(groups, pools.usable, longest) != 0


@given(groups=groups_drawn, budget=st.integers(1000, 300_000), more=st.integers(0, 100_000))
def test_more_memory_never_means_fewer_blocks(groups: list[GroupSpec], budget: int, more: int) -> None:
    longest = longest_that_fits(groups, DEMAND, budget, 64)
    if longest:
        small = share_out(groups, DEMAND, budget, longest=longest, average=longest)
        large = share_out(groups, DEMAND, budget + more, longest=longest, average=longest)
        assert all(a <= b for a, b in zip(small.usable, large.usable, strict=True))


def test_nothing_is_left_that_holds_a_block_of_each_group() -> None:
    budget = 1_000_000
    pools = share_out((FULL, WINDOW), DEMAND, budget, longest=64, average=64)
    assert budget - pools.size_bytes < FULL.block_bytes(BLOCK) + WINDOW.block_bytes(BLOCK)
    full, window = pools.usable  # 64 tokens are 8 blocks, of which the window needs 5 at rest and 3 more in a step
    assert window == 3 + full * 5 // 8


def test_a_long_average_gives_memory_from_windows_to_full_attention() -> None:
    short = share_out((FULL, WINDOW), DEMAND, 1_000_000, longest=64, average=64)
    long = share_out((FULL, WINDOW), DEMAND, 1_000_000, longest=64, average=640)
    assert short.usable[0] < 2 * short.usable[1] and long.usable[0] > 10 * long.usable[1]


def test_windows_have_one_for_each_sequence_and_a_step_once() -> None:
    """As many sequences of the average length fit into either pool, whatever a step's tokens are."""
    for in_flight in (8, 32, 4096):
        demand = Demand(tokens_per_block=BLOCK, max_tokens_in_flight=in_flight)
        pools = share_out((FULL, WINDOW), demand, 10_000_000, longest=8000, average=800)
        by_group = [demand.sequences_held([g], [n], 800) for g, n in zip((FULL, WINDOW), pools.usable, strict=True)]
        assert by_group[0] == by_group[1] == pools.usable[0] // 100
        assert pools.usable[1] == in_flight // BLOCK + pools.usable[0] * 5 // 100


def test_nothing_is_given_to_windows_that_no_sequence_uses() -> None:
    """Without reuse the blocks of ended sequences are of no use: what the windows don't need goes to the others."""
    kept = Demand(tokens_per_block=BLOCK, max_tokens_in_flight=32, max_sequences=4)
    off = replace(kept, keeps_prefixes=False)
    most = 4 * 5 + 32 // BLOCK
    with_reuse, without = (share_out((FULL, WINDOW), d, 10**6, longest=64, average=64) for d in (kept, off))
    assert with_reuse.usable[1] > 10 * most and without.usable[1] == most
    assert without.usable[0] > with_reuse.usable[0] and 10**6 - without.size_bytes < FULL.block_bytes(BLOCK)
    assert off.sequences_held((WINDOW,), (most,), 10_000) == 4
    beams = replace(off, has_beams=True)  # which keep all
    assert share_out((FULL, WINDOW), beams, 10**6, longest=64, average=64).usable[1] > 10 * most


def test_no_pool_holds_more_than_max_tokens() -> None:
    pools = share_out((FULL, WINDOW, STATES), DEMAND, 10**9, longest=64, average=64, max_tokens=100)
    assert pools.usable == (12, 12, 100 // 16)


def test_stated_shares() -> None:
    pools = share_by_ratio((FULL, WINDOW), DEMAND, 100_000, ratio=(0.75, 0.25))
    assert pools.usable == (75_000 // 800 - 1, 25_000 // 400 - 1)
    with pytest.raises(ValueError, match=r"pool_ratio: the share 0.01 of layer group 1 is 1,000 bytes .* take 1,600"):
        share_by_ratio((FULL, GroupSpec((1,), 2, 4, "x", bytes_per_token=100)), DEMAND, 100_000, ratio=(0.99, 0.01))


def test_a_lower_tier_is_divided_as_the_device_is() -> None:
    device = Pools((100, 50), 0)
    blocks = share_tier((FULL, WINDOW), BLOCK, device, 1_000_000)
    assert sum(count * group.block_bytes(BLOCK) for count, group in zip(blocks, (FULL, WINDOW))) <= 1_000_000
    assert (blocks[0] - 1) // 2 == blocks[1] - 1
    assert share_tier((FULL, WINDOW), BLOCK, device, 2400) == (2, 2)
    with pytest.raises(ValueError, match="2,399 bytes hold no block of each layer group: at least 2,400 are needed"):
        share_tier((FULL, WINDOW), BLOCK, device, 2399)
