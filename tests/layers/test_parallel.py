from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.layers.parallel import ParallelContext, share, share_heads


@given(total=st.integers(0, 1000), size=st.integers(1, 16))
def test_shares_cover_everything_once(total: int, size: int) -> None:
    shares = [share(total, rank, size) for rank in range(size)]
    assert shares[0][0] == 0 and shares[-1][1] == total
    assert all(left[1] == right[0] for left, right in itertools.pairwise(shares))
    lengths = [stop - start for start, stop in shares]
    assert max(lengths) - min(lengths) <= 1


@given(kv_heads=st.integers(1, 16), group=st.integers(1, 8), size=st.integers(1, 16))
def test_heads_sit_with_the_kv_head_that_they_read(kv_heads: int, group: int, size: int) -> None:
    num_heads = kv_heads * group
    if size > num_heads:
        with pytest.raises(ValueError, match="tensor_parallel_size"):
            [share_heads(num_heads, kv_heads, rank=rank, size=size) for rank in range(size)]
        return
    try:
        shares = [share_heads(num_heads, kv_heads, rank=rank, size=size) for rank in range(size)]
    except ValueError:
        assert size > kv_heads and -(-size // kv_heads) > group
        return
    assert [head for one in shares for head in range(*one.q)] == list(range(num_heads))
    assert {head for one in shares for head in range(*one.kv)} == set(range(kv_heads))
    for one in shares:
        assert one.num_heads > 0 and one.num_heads % one.num_kv_heads == 0
        local_group = one.num_heads // one.num_kv_heads
        for local, head in enumerate(range(*one.q)):
            assert head // group == one.kv[0] + local // local_group


def test_even_and_uneven_heads() -> None:
    assert [share_heads(8, 4, rank=r, size=2).q for r in range(2)] == [(0, 4), (4, 8)]
    # SmolLM2 on two ranks: 9 heads over 3 KV heads.
    assert [share_heads(9, 3, rank=r, size=2).q for r in range(2)] == [(0, 6), (6, 9)]
    # Gemma 3 270M on two ranks: one KV head, replicated.
    assert [share_heads(4, 1, rank=r, size=2).kv for r in range(2)] == [(0, 1), (0, 1)]


def test_one_rank_does_nothing() -> None:
    import torch

    alone = ParallelContext()
    x = torch.ones(2, 3)
    assert alone.collectives.all_reduce(x) is x
    assert alone.collectives.all_gather(x, -1) is x
    alone.collectives.close()
