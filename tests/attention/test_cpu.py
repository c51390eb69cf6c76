"""The compiled backend's own promise: the same bits, however the work is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.attention.cpu import CpuAttention
from headrace.kernels import paged_attention as kernel
from headrace.kernels._native import library
from headrace.kernels.quantise import PLAIN, Quantised
from tests.kits import attention as kit
from tests.kits.attention import Case, World

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler: the torch twin makes no such promise")

CASES = {
    "plain": Case(),
    "block of two": Case(block_size=2, lengths=(33, 18)),
    "block of 32, read in place": Case(block_size=32, lengths=(70, 33), head_dim=64, group=3, num_kv_heads=1),
    "window": Case(window=9, lengths=(50, 31, 8)),
    "window of a tile": Case(window=32, block_size=16, lengths=(75, 33)),
    "sinks and cap": Case(has_sinks=True, soft_cap=4.0, window=20),
    "odd head size": Case(head_dim=20, group=5, num_kv_heads=1),
    "many heads of one": Case(group=40, num_kv_heads=1, lengths=(35,)),
    "half cache": Case(kv_dtype=torch.bfloat16, lengths=(45, 3)),
    "half, read in place": Case(block_size=32, lengths=(70, 33), head_dim=64, group=3, kv_dtype=torch.bfloat16),
    "half": Case(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=72, lengths=(45, 3)),
}
LONG = Case(lengths=(1100, 40), block_size=32, num_kv_heads=1, group=2, head_dim=16)


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str) -> None:
    kit.check_same_bits(CpuAttention(), CASES[name])


@pytest.mark.parametrize(("window", "kv_dtype"), [(None, torch.float32), (600, torch.float32), (None, torch.bfloat16)])
def test_same_bits_over_several_parts(window: int | None, kv_dtype: torch.dtype) -> None:
    """Contexts of more than one part, with threads that share a row's parts and without."""
    case = replace(LONG, window=window, kv_dtype=kv_dtype)
    world, backend = World(case), CpuAttention()
    expected = world.attend(backend, kit.whole(case))
    kit.assert_close(world, expected)
    decode = [[(0, 1022), (1, 39)], *[[(0, 1)]] * 4, [(0, 1), (1, 1)], [(0, 73)]]
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for schedule in (kit.chunked(case, 97), decode):
            kit.assert_same(world.attend(backend, schedule), expected)


def test_a_nan_of_a_visible_token_is_not_hidden() -> None:
    case = Case(lengths=(40,))
    world = World(case)
    world.k[0][3, 0] = float("nan")
    (out,) = world.attend(CpuAttention(), kit.whole(case))
    assert out[3:, :2].isnan().all() and not out[:3].isnan().any() and not out[:, 2:].isnan().any()


def test_large_scores_do_not_overflow() -> None:
    case = Case(lengths=(70,))
    world = World(case)
    world.q[0] *= 1000
    (out,) = world.attend(CpuAttention(), kit.whole(case))
    (wanted,) = World.attend(world, _Twin(), kit.whole(case))
    assert out.isfinite().all()
    torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-3)


def test_a_cache_that_is_a_view_of_a_pool() -> None:
    """K and V of several layers in one tensor."""
    case = Case(lengths=(21, 10))
    world, backend = World(case), CpuAttention()
    alone = world.new_cache(backend)
    pool = torch.full((alone.k.shape[0], 3, 2, *alone.k.shape[1:]), float("nan"))
    view = kit.LayerCache(pool[:, 1, 0], pool[:, 1, 1])
    kit.assert_same(
        world.attend(backend, kit.chunked(case, 4), cache=view),
        world.attend(backend, kit.chunked(case, 4), cache=alone),
    )
    assert pool[:, [0, 2]].isnan().all()


def test_an_empty_row_among_others() -> None:
    case = Case(lengths=(9, 4))
    world = World(case)
    step = world.step([(0, 9), (1, 0)], [0, 0])
    backend = CpuAttention()
    act = backend.run(
        world.projected([(0, 9), (1, 0)], [0, 0]), cache=world.new_cache(backend), step=step, spec=world.spec
    )
    kit.assert_close(world, [act.data.view(world.q[0].shape)])


class _Twin(CpuAttention):
    def run(self, packed, *, cache, step, spec, form=PLAIN):
        q = packed.heads()[0].clone()
        super().run(packed, cache=cache, step=step, spec=spec)
        return Quantised(kernel.paged_attention_twin(q, cache.k, cache.v, step, spec).flatten(1))
