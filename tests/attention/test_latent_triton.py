"""Latent attention by Triton's kernels with keys and values unfolded: nothing changes but the form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.attention import _unfolding as unfolding
from headrace.attention._unfolding import Batch
from headrace.attention.latent_torch import LatentTorch
from headrace.kernels._unfolded_work import ContextRow
from headrace.kernels.quantise import FP8
from tests.attention.test_latent import Moved
from tests.kits import latent as kit
from tests.kits.interpreter import DEVICES
from tests.kits.latent import Case, World, pretend_it_pays

pytest.importorskip("triton")

from headrace.attention import latent_triton
from headrace.kernels import _triton_unfolded
from headrace.kernels._triton_unfolded import Tuning

SMALL = Tuning(16, 16, 4, 1)


@pytest.fixture(params=DEVICES)
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Moved:
    """Unfolds what is never worth it; small tiles on a CPU."""
    pretend_it_pays(monkeypatch)
    if request.param == "cpu":
        monkeypatch.setattr(latent_triton, "tuned", lambda _, room: SMALL)
        monkeypatch.setattr(_triton_unfolded, "tuned", lambda _, room: SMALL)
    return Moved(request.param)


CASES = {
    "odd sizes": Case(lengths=(23, 9)),
    "no turned part": Case(rope_dim=0, lengths=(33, 17), num_heads=2),
    "half": Case(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, lengths=(21, 18), rank=72, interleaved=False),
    "FP8 cache": Case(dtype=torch.bfloat16, kv_dtype=FP8, lengths=(20, 9), block_size=16, num_heads=2),
    "whole tiles": Case(nope_dim=32, v_dim=16, rope_dim=16, lengths=(30, 7), block_size=4),
}


@pytest.mark.parametrize("name", CASES)
def test_unfolding_changes_nothing(triton: Moved, name: str, poisoned: list[int]) -> None:
    """Prompts whole and in a second chunk, and a row that generates beside one."""
    world = World(CASES[name])
    first, second = world.case.lengths
    kit.assert_close(world, world.attend(triton, [[(0, first - 4), (1, second - 1)], [(0, 4), (1, 1)]]))
    assert len(poisoned) == 2


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Workspaces begin as NaN. -> how many batches were unfolded"""
    calls: list[int] = []
    usual: Any = latent_triton._unfolded
    new_empty: Any = torch.Tensor.new_empty

    def poisoned_empty(self: Tensor, *size: int, **options: Any) -> Tensor:
        found = new_empty(self, *size, **options)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    def counted(*args: Any, **options: Any) -> None:
        calls.append(1)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", poisoned_empty)
            usual(*args, **options)

    monkeypatch.setattr(latent_triton, "_unfolded", counted)
    return calls


def test_groups_of_heads_that_do_not_divide(
    triton: Moved, monkeypatch: pytest.MonkeyPatch, poisoned: list[int]
) -> None:
    """A workspace of two heads for three of them, and a row a batch."""
    case = Case(lengths=(24, 20, 9), block_size=4)
    spec = World(case).spec
    num_bytes = 128 * (spec.rank + spec.rope_dim + 2 * (spec.nope_dim + spec.v_dim)) * 4
    monkeypatch.setattr(unfolding, "MAX_WORKSPACE_BYTES", num_bytes)
    monkeypatch.setattr(unfolding, "PROCESSORS", 1)
    world = World(case)
    batches = unfolding.divide([(24, 24), (20, 20), (8, 8)], spec, num_rows=3, item_bytes=4).unfolded
    assert [(batch.group, batch.segment) for batch in batches] == [(2, None)] * 3
    kit.assert_close(world, world.attend(triton, [[(0, 24), (1, 20), (2, 8)], [(2, 1)]]))
    assert len(poisoned) == len(batches)


@pytest.mark.parametrize("segment", [16, 5])
def test_contexts_in_segments(
    triton: Moved, monkeypatch: pytest.MonkeyPatch, poisoned: list[int], segment: int
) -> None:
    """Boundaries within and between tiles of keys and queries; rows of which one has fewer segments, after a cached
    prefix; groups of two heads of three."""
    case = Case(lengths=(24, 9), block_size=4)
    world = World(case)
    cache = world.new_cache(triton)
    world.attend(LatentTorch(), [[(0, 6), (1, 2)]], cache=cache)

    def in_segments(rows: Sequence[ContextRow], *_: Any, **_options: Any) -> tuple[Batch, ...]:
        return (Batch(tuple(rows), 2, segment),)

    monkeypatch.setattr(unfolding, "batches", in_segments)
    outs = world.attend(triton, [[(0, 18), (1, 7)]], cache=cache, done=[6, 2])
    kit.assert_close(world, outs, done=[6, 2])
    assert poisoned


def test_rows_that_stay_absorbed_between_others(triton: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of them: before, between and behind unfolded ones, the last with generation rows."""
    monkeypatch.setattr(unfolding, "saved_us", lambda num_tokens, _kv_len, _spec: float(num_tokens > 5))
    world = World(Case(lengths=(8, 10, 3, 7, 11, 8), num_heads=2))
    cache = world.new_cache(triton)
    world.attend(LatentTorch(), [[(0, 4), (1, 4), (4, 7), (5, 7)]], cache=cache)
    done = [4, 4, 0, 0, 7, 7]
    outs = world.attend(triton, [[(0, 4), (1, 6), (2, 3), (3, 7), (4, 4), (5, 1)]], cache=cache, done=done)
    kit.assert_close(world, outs, done=done)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8), (torch.float32,) * 2])
def test_the_sizes_of_deepseek_v3(
    triton: Moved, dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch, poisoned: list[int]
) -> None:
    case = Case(
        num_heads=128, rank=512, rope_dim=64, nope_dim=128, v_dim=128, block_size=32,
        lengths=(90, 300, 700), dtype=dtypes[0], kv_dtype=dtypes[1],
    )  # fmt: skip
    kit.check_reference(triton, case)
    world = World(case)
    kit.assert_close(world, world.attend(triton, kit.chunks(case, 260)))
    monkeypatch.setattr(unfolding, "MAX_WORKSPACE_BYTES", 24 << 20)
    kit.assert_close(world, world.attend(triton, kit.chunks(case, 400)))
    assert poisoned
