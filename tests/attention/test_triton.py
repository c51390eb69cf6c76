"""The Triton backend beside the torch one: FP8 caches, parts of long contexts, forms of the result, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace import plugins
from headrace.attention.port import AttentionBackend, AttentionSpec, AttentionStep, LayerCache
from headrace.attention.torch import TorchAttention
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised, dequantise
from headrace.kernels.rope_write import Projected
from tests.kits import attention as kit
from tests.kits.attention import Case, World
from tests.kits.interpreter import DEVICES, ordered_sums  # noqa: F401 (a fixture)


class Moved(TorchAttention):
    """A backend on another device than the tensors of the kit, which the cache returns to after each step."""

    def __init__(self, device: str, *, name: str = "triton") -> None:
        self.device = device
        self.backend: AttentionBackend = plugins.load("attention", name)()

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        moved = LayerCache(cache.k.to(self.device), cache.v.to(self.device))
        projected = replace(packed, **{name: getattr(packed, name).to(self.device) for name in ("qkv", "cos", "sin")})
        names = ("query_starts", "kv_lens", "positions", "block_tables", "write_slots")
        here = replace(step, **{name: getattr(step, name).to(self.device) for name in names}, scratch={})
        sinks = None if spec.sinks is None else spec.sinks.to(self.device)
        wanted = form if form.scale is None else replace(form, scale=form.scale.to(self.device))
        out = self.backend.run(projected, cache=moved, step=here, spec=replace(spec, sinks=sinks), form=wanted)
        cache.k.copy_(moved.k)
        cache.v.copy_(moved.v)
        return Quantised(out.data.cpu(), None if out.scales is None else out.scales.cpu())


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> Moved:
    return Moved(request.param)


CASES = {
    "plain": Case(head_dim=64, block_size=32, lengths=(37, 1)),
    "cap, sinks and window": Case(soft_cap=4.0, has_sinks=True, window=20, group=3, lengths=(33, 5)),
    "window and first tokens": Case(window=9, sink_tokens=5, lengths=(40,)),
    "chunks": Case(window=9, is_chunked=True, lengths=(40, 18)),
    "half": Case(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=72, group=5, num_kv_heads=1, lengths=(45, 3)),
    "FP8 cache": Case(dtype=torch.bfloat16, kv_dtype=FP8, head_dim=32, block_size=16, lengths=(40, 17)),
    "heads of 512": Case(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=512, group=4, lengths=(35, 9)),
    "heads of 512 in float32": Case(head_dim=512, num_kv_heads=1, lengths=(18, 17)),
    "wide heads": Case(dtype=torch.bfloat16, kv_dtype=FP8, head_dim=256, num_kv_heads=1, lengths=(20, 17)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(backend: Moved, name: str) -> None:
    kit.check_reference(backend, CASES[name])


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 9])
def test_fixed_tiles_give_the_same_bits(device: str, window: int | None) -> None:
    """In any chunk and beside any other rows, prompts' tokens and generated ones alike."""
    case = Case(lengths=(70, 5), block_size=32, num_kv_heads=1, window=window)
    world, backend = World(case), Moved(device, name="fixed")
    expected = world.attend(backend, kit.whole(case))
    for schedule in ([[(0, 66), (1, 4)], [(0, 1), (1, 1)]], [[(1, 5)], [(0, 33)], [(0, 36)]]):
        for out, wanted in zip(world.attend(backend, schedule), expected):
            assert torch.equal(out, wanted[: len(out)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_fixed_tiles_give_the_same_bits_in_every_case(name: str) -> None:
    kit.check_same_bits(Moved("cuda", name="fixed"), CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_equals_dense_attention_over_odd_cases(seed: int) -> None:
    kit.check_reference(Moved("cuda"), kit.random_case(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("check", [kit.check_dropped_rows, kit.check_released_blocks, kit.check_strided_projection])
def test_the_kits_other_promises(check: Any) -> None:
    check(Moved("cuda"))


@pytest.mark.parametrize("window", [None, 100])
def test_a_long_context_is_cut_in_parts(backend: Moved, window: int | None) -> None:
    """One row decoding over three parts, and a row that fits in one."""
    case = Case(lengths=(150, 9), block_size=32, num_kv_heads=1, group=2, has_sinks=True, window=window)
    world = World(case)
    kit.assert_close(world, world.attend(backend, [[(0, 148), (1, 7)], [(0, 1), (1, 1)], [(1, 1), (0, 1)]]))


def test_scales_of_an_fp8_cache(backend: Moved) -> None:
    """As the twin: the cache holds the same bits, and what is attended has the scales back."""
    case = Case(dtype=torch.bfloat16, kv_dtype=FP8, head_dim=32, block_size=16, lengths=(40, 17))
    world = World(case)
    spec = replace(world.spec, k_scale=0.03, v_scale=0.02)
    caches = [world.new_cache(backend) for _ in range(2)]
    done = [0, 0]
    for rows in ([(0, 39), (1, 16)], [(0, 1), (1, 1)]):
        step = world.step(rows, done)
        outs = [
            attend.run(world.projected(rows, done), cache=cache, step=step, spec=spec).data.float()
            for attend, cache in zip((backend, TorchAttention()), caches)
        ]
        torch.testing.assert_close(*outs, atol=0.02, rtol=0.02)
        done = [before + count for before, (_, count) in zip(done, rows)]
    for ours, twins in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        differs = (ours.float().nan_to_num(-1.0) - twins.float().nan_to_num(-1.0)).abs() > 0
        assert differs.float().mean() < 0.01, "but for values at a tie"


@pytest.mark.parametrize("kind", ["static", "token", "group"])
def test_what_was_mixed_comes_in_the_form_that_is_wanted(backend: Moved, kind: Any) -> None:
    case = Case(head_dim=32, num_kv_heads=2, group=2, lengths=(9, 4))
    world = World(case)
    form = Form(kind, torch.tensor([0.02]) if kind == "static" else None, group=64)
    for rows, done in (([(0, 9), (1, 4)], [0, 0]), ([(0, 1), (1, 1)], [8, 3])):
        step = world.step(rows, done)
        cache = LayerCache(*(torch.randn(part.shape) for part in (world.new_cache(backend).k,) * 2))
        other = LayerCache(cache.k.clone(), cache.v.clone())
        act = backend.run(world.projected(rows, done), cache=cache, step=step, spec=world.spec, form=form)
        plain = TorchAttention().run(world.projected(rows, done), cache=other, step=step, spec=world.spec)
        assert act.data.dtype == FP8
        torch.testing.assert_close(dequantise(act), plain.data, atol=0.04, rtol=0.07)


def test_rows_of_padding_give_zeros_or_anything_and_disturb_nobody(backend: Moved) -> None:
    """Padding: no token in the cache, or one in the dummy block 0."""
    case = Case(lengths=(6, 5))
    world = World(case)
    cache = LayerCache(*(torch.randn(part.shape) for part in (world.new_cache(backend).k,) * 2))
    expected = TorchAttention().run(
        world.projected([(0, 1), (1, 1)], [5, 4]),
        cache=LayerCache(cache.k.clone(), cache.v.clone()),
        step=world.step([(0, 1), (1, 1)], [5, 4]),
        spec=world.spec,
    )
    step = world.step([(0, 1), (1, 1), (0, 1), (1, 1)], [5, 4])
    step.kv_lens[2], step.kv_lens[3] = 0, 1
    step.block_tables[2:] = 0
    step.write_slots[2:] = 0
    act = backend.run(
        world.projected([(0, 1), (1, 1), (0, 1), (1, 1)], [5, 4]), cache=cache, step=step, spec=world.spec
    )
    torch.testing.assert_close(act.data[:2], expected.data, atol=2e-5, rtol=2e-5)
    assert act.data[2].eq(0).all() and act.data[3].isfinite().all()
