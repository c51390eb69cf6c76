"""Every backend of latent attention keeps the contract of tests/kits/latent.py; FP8, parts and padding of Triton's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import plugins
from headrace.attention._latent import Choice, IndexProjected, LatentCache, LatentProjected, LatentSpec
from headrace.attention.latent_torch import LatentTorch
from headrace.attention.port import AttentionStep
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised, dequantise
from tests.kits import latent as kit
from tests.kits.interpreter import DEVICES, HAS_INTERPRETER
from tests.kits.latent import Case, World

NAMES = [name for name in plugins.names("attention") if name.startswith("latent_")]


SLOW = [pytest.param(name, marks=pytest.mark.slow if name == "latent_triton" else ()) for name in NAMES]
"""The interpreter takes seconds a case."""


@pytest.fixture(params=SLOW)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "latent_triton" and not HAS_INTERPRETER:
        pytest.skip("on a CPU this backend needs Triton and its interpreter")
    return plugins.load("attention", request.param)()


@pytest.mark.parametrize("seed", range(16))
def test_equals_unfolded_attention(backend: Any, seed: int, request: pytest.FixtureRequest) -> None:
    if seed > 0 and request.node.callspec.params["backend"] == "latent_triton":
        pytest.skip("the interpreter takes seconds a case: the others run on a GPU")
    kit.check_reference(backend, kit.random_case(seed))


def test_rows_of_the_dummy_block_disturb_nobody(backend: Any) -> None:
    kit.check_dropped_rows(backend)


def test_blocks_out_of_the_window_are_not_read(backend: Any) -> None:
    kit.check_released_blocks(backend)


def test_copied_blocks_hold_the_same(backend: Any) -> None:
    kit.check_copied_blocks(backend)


def test_a_choice_is_shared(backend: Any) -> None:
    kit.check_shared_choice(backend)


def test_the_projection_may_be_strided(backend: Any) -> None:
    kit.check_strided_projection(backend)


class Moved(LatentTorch):
    """The Triton backend on another device than the tensors of the kit, which the cache returns to after each step."""

    def __init__(self, device: str) -> None:
        from headrace.attention.latent_triton import LatentTriton

        self.device = device
        self.backend = LatentTriton()

    def run(
        self,
        packed: LatentProjected,
        *,
        cache: LatentCache,
        step: AttentionStep,
        spec: LatentSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        here = self._moved(cache)
        names = ("query_starts", "kv_lens", "positions", "block_tables", "write_slots")
        moved_step = replace(step, **{name: getattr(step, name).to(self.device) for name in names}, scratch={})
        wanted = form if form.scale is None else replace(form, scale=form.scale.to(self.device))
        out = self.backend.run(self._moved(packed), cache=here, step=moved_step, spec=spec, form=wanted)
        cache.latent.copy_(here.latent)
        if cache.index_keys is not None:
            cache.index_keys.copy_(here.index_keys)
        return Quantised(out.data.cpu(), None if out.scales is None else out.scales.cpu())

    def _moved(self, values: Any) -> Any:
        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(self.device)
            return self._moved(value) if isinstance(value, (IndexProjected, Choice)) else value

        return replace(values, **{part.name: moved(getattr(values, part.name)) for part in fields(values)})


@pytest.fixture(params=DEVICES)
def triton(request: pytest.FixtureRequest) -> Moved:
    return Moved(request.param)


CASES = {
    "many heads": Case(num_heads=70, lengths=(7, 3), rank=32, rope_dim=16),
    "window and first tokens": Case(window=9, sink_tokens=5, lengths=(40,)),
    "indexer": Case(top=6, lengths=(14, 4), index_dim=16),
    "no turned part": Case(rope_dim=0, lengths=(14, 21), window=9),
    "no turned part, indexer": Case(rope_dim=0, top=6, lengths=(14, 4), index_dim=16),
    "half": Case(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, lengths=(21, 3), rank=72, interleaved=False),
    "no turned part, half": Case(rope_dim=0, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, lengths=(21, 3)),
    "FP8 cache": Case(dtype=torch.bfloat16, kv_dtype=FP8, lengths=(20, 17), block_size=16),
}


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_unfolded_attention(triton: Moved, name: str) -> None:
    kit.check_reference(triton, CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_equals_unfolded_attention_over_odd_cases(seed: int) -> None:
    kit.check_reference(Moved("cuda"), kit.random_case(seed))


@pytest.mark.gpu
def test_the_sizes_of_deepseek_v3() -> None:
    for dtype, kv_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8), (torch.float32, torch.float32)):
        kit.check_reference(
            Moved("cuda"),
            Case(
                num_heads=128, rank=512, rope_dim=64, nope_dim=128, v_dim=128, block_size=32,
                lengths=(90, 300), dtype=dtype, kv_dtype=kv_dtype,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("case", [Case(lengths=(150, 9), block_size=32), Case(lengths=(150, 9), top=140)])
def test_a_long_context_is_cut_in_parts(triton: Moved, case: Case) -> None:
    """One row decoding over three parts, and a row that fits in one."""
    world = World(case)
    cache = world.new_cache(triton)
    world.attend(LatentTorch(), [[(0, 148), (1, 7)]], cache=cache)
    outs = world.attend(triton, [[(0, 1), (1, 1)], [(1, 1), (0, 1)]], cache=cache, done=[148, 7])
    kit.assert_close(world, outs, done=[148, 7])


@pytest.mark.parametrize("kind", ["static", "token"])
def test_what_was_mixed_comes_in_the_form_that_is_wanted(triton: Moved, kind: Any) -> None:
    world = World(Case(lengths=(9, 4)))
    form = Form(kind, torch.tensor([0.02]) if kind == "static" else None)
    rows = [(0, 9), (1, 4)]
    step = world.step(rows, [0, 0])
    cache = world.new_cache(triton)
    act = triton.run(world.projected(rows, [0, 0]), cache=cache, step=step, spec=world.spec, form=form)
    plain = LatentTorch().run(world.projected(rows, [0, 0]), cache=cache, step=step, spec=world.spec)
    assert act.data.dtype == FP8
    torch.testing.assert_close(dequantise(act), plain.data, atol=0.04, rtol=0.07)


def test_rows_of_padding_disturb_nobody(triton: Moved) -> None:
    """Padding: no token in the cache, or one in the dummy block 0."""
    for top in (None, 3):
        world = World(Case(lengths=(6, 5), top=top))
        cache = world.new_cache(triton)
        world.attend(triton, [[(0, 5), (1, 4)]], cache=cache)
        rows = [(0, 1), (1, 1), (0, 1), (1, 1)]
        step = world.step(rows, [5, 4])
        step.kv_lens[2], step.kv_lens[3] = 0, 1
        step.block_tables[2:] = 0
        step.write_slots[2:] = 0
        act = triton.run(world.projected(rows, [5, 4]), cache=cache, step=step, spec=world.spec)
        got = act.data.unflatten(-1, (3, 12)).double()
        for row, at in ((0, 5), (1, 4)):
            torch.testing.assert_close(got[row], world.reference(row)[at], atol=2e-5, rtol=2e-5)
        assert got[2].eq(0).all()
