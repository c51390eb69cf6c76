"""Prompts whose keys and values are unfolded: who is, and how much at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.attention import _unfolding as unfolding
from headrace.attention._latent import IndexSpec, LatentSpec
from headrace.attention._unfolding import Parts, divide, saved_us, step_saves_us
from headrace.kernels._unfolded_work import ContextRow

V3 = LatentSpec(num_heads=128, rank=512, rope_dim=64, nope_dim=128, v_dim=128, scale=0.07)


def test_long_prompts_pay() -> None:
    """By operations: 8,192 tokens of DeepSeek-V3 take 9.4 tera-operations absorbed and 2.7 unfolded."""
    measured = {(8192, 8192): 21_239, (8192, 32768): 165_493, (512, 8704): 2_448}  # docs/performance.md: the table's
    for (num_tokens, kv_len), saved in measured.items():
        assert saved_us(num_tokens, kv_len, V3) == pytest.approx(saved, rel=0.25)
    assert saved_us(16, 8208, V3) < 0, "unfolding the context costs more than attending to it"
    assert saved_us(1, 8192, V3) < 0
    some = LatentSpec(num_heads=16, rank=512, rope_dim=64, nope_dim=128, v_dim=128, scale=0.07)
    assert saved_us(8192, 8192, some) * 8 == pytest.approx(saved_us(8192, 8192, V3))


def test_windows_and_indexers_stay_absorbed() -> None:
    rows = [(8192, 8192)]
    assert step_saves_us(rows, V3) > 0
    assert step_saves_us(rows, replace(V3, window=4096)) == 0
    assert step_saves_us(rows, replace(V3, index=IndexSpec(64, 128, 2048))) == 0
    assert divide(rows, replace(V3, window=4096), num_rows=1, item_bytes=2) == Parts((), ((0, 1),))


def test_a_step_is_divided_by_rows() -> None:
    """Prompts before generation rows; one is short behind a long context, one alone too small."""
    rows = [(4096, 4096), (16, 8192), (2048, 2048), (3, 3)]
    parts = divide(rows, V3, num_rows=6, item_bytes=2)
    assert parts.absorbed == ((1, 2), (3, 6))
    rows_of_batches = [row for batch in parts.unfolded for row in batch.rows]
    assert rows_of_batches == [ContextRow(0, 0, 4096, 4096), ContextRow(2, 4112, 2048, 2048)]
    assert divide(None, V3, num_rows=6, item_bytes=2) == Parts((), ((0, 6),)), "only the device knows the lengths"
    assert divide([(3, 3)], V3, num_rows=1, item_bytes=2) == Parts((), ((0, 1),)), "not worth its launches"


@pytest.mark.parametrize(
    "rows", [[(8192, 8192)], [(8192, 32768)], [(512, 8704)] * 16, [(128, 128)] * 64, [(4096, 65536), (4096, 4096)]]
)  # fmt: skip
def test_the_workspace_is_bounded(rows: Sequence[tuple[int, int]]) -> None:
    parts = divide(rows, V3, num_rows=len(rows), item_bytes=2)
    assert parts.absorbed == () and sum(len(batch.rows) for batch in parts.unfolded) == len(rows)
    for batch in parts.unfolded:
        num_kv = sum(row.kv_len for row in batch.rows)
        assert num_kv * (512 + 64 + batch.group * (128 + 128)) * 2 <= unfolding.MAX_WORKSPACE_BYTES
        num_tiles = sum(-(-row.num_tokens // unfolding.TOKENS_A_TILE) for row in batch.rows)
        assert batch.group * num_tiles > 0.95 * unfolding.PROCESSORS or batch.group == 128


def test_groups_leave_few_processors_idle() -> None:
    """64 tiles a head: 12 heads are 5.8 rounds of 132 processors, 13 are 6.3; 8 tiles of all heads are one launch."""
    assert unfolding.group_of(13, 64, num_heads=128) == 12
    assert unfolding.group_of(5, 64, num_heads=128) == 4
    assert unfolding.group_of(200, 8, num_heads=128) == 128
    assert unfolding.group_of(61, 64, num_heads=128) in range(43, 62)


def test_many_short_prompts_are_few_launches() -> None:
    parts = divide([(128, 128)] * 64, V3, num_rows=64, item_bytes=2)
    assert sum(-(-V3.num_heads // batch.group) for batch in parts.unfolded) <= 4


@pytest.mark.parametrize("num_tokens, kv_len", [(8192, 1 << 20), (8192, 131072), (128, 32768), (65536, 262144)])
def test_long_contexts_come_in_segments(num_tokens: int, kv_len: int) -> None:
    """Heads for all processors, what is carried within the bound too."""
    (batch,) = divide([(num_tokens, kv_len)], V3, num_rows=1, item_bytes=2).unfolded
    assert batch.segment is not None and batch.segment % 128 == 0
    num_tiles = num_tokens // 128
    assert batch.group * num_tiles > 0.95 * min(unfolding.PROCESSORS, 128 * num_tiles)
    num_bytes = batch.segment * (512 + 64 + batch.group * (128 + 128)) * 2 + num_tiles * 128 * batch.group * 130 * 4
    assert unfolding.MAX_WORKSPACE_BYTES // 2 < num_bytes <= unfolding.MAX_WORKSPACE_BYTES
