"""Row kernels in Triton against their torch twins: norm, activation, quantise, and rope with the cache write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.act_mul_quantise import act_mul_quantise_twin
from headrace.kernels.norm_quantise import norm_quantise_twin
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised, quantise, quantise_twin
from headrace.kernels.rope_write import HeadScale, Projected, rope_write, rope_write_twin
from tests.kits.interpreter import DEVICES

KINDS = ["plain", "static", "token", "group"]
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def form_of(kind: Any) -> Form:
    return Form(kind, torch.tensor([0.013]) if kind == "static" else None)


def on(form: Form, device: str) -> Form:
    return form if form.scale is None else replace(form, scale=form.scale.to(device))


def assert_alike(got: Quantised, wanted: Quantised) -> None:
    """Equal but for rare values that lay between two; those differ by one step."""
    assert got.data.dtype == wanted.data.dtype and got.data.shape == wanted.data.shape
    if wanted.scales is not None:
        assert got.scales is not None
        torch.testing.assert_close(got.scales.cpu(), wanted.scales, atol=0, rtol=1e-2)
    step = {FP8: 2**-3, torch.bfloat16: 2**-7, torch.float32: 4e-6}[wanted.data.dtype]
    out, right = got.data.cpu().float(), wanted.data.float()
    torch.testing.assert_close(out, right, atol=2**-8 if wanted.data.dtype == FP8 else 2e-5, rtol=step)
    if wanted.data.dtype != torch.float32:
        assert ((out - right).abs() > 1e-5).float().mean() < 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_norm(device: str, dtype: torch.dtype, kind: str) -> None:
    from headrace.kernels._triton_rows import launch_norm

    for width in (128, 384) if kind == "group" else (7, 576):
        wide, residual, weight = draw(5, width + 9, dtype=dtype), draw(5, width, dtype=dtype), draw(width, dtype=dtype)
        x, form = wide[:, 8 : width + 8], form_of(kind)
        for added, plus_one in ((None, False), (residual, True), (residual, False)):
            wanted, wanted_sum = norm_quantise_twin(x, weight, 1e-5, form=form, residual=added, plus_one=plus_one)
            got, summed = launch_norm(
                wide.to(device)[:, 8 : width + 8],
                weight.to(device),
                1e-5,
                form=on(form, device),
                residual=None if added is None else added.to(device),
                plus_one=plus_one,
            )
            assert_alike(got, wanted)
            assert (summed is None) == (wanted_sum is None)
            if summed is not None and wanted_sum is not None:
                assert torch.equal(summed.cpu(), wanted_sum)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_act_mul(device: str, dtype: torch.dtype, kind: str, activation: Any) -> None:
    from headrace.kernels._triton_rows import launch_act_mul

    widths = {"group": (128, 2304), "token": (33, 2500, 16500)}.get(kind, (33, 2500))
    for width in widths:
        x = draw(2, 2 * width, dtype=dtype) * 3
        wanted = act_mul_quantise_twin(x, activation, form=form_of(kind))
        assert_alike(launch_act_mul(x.to(device), activation, form=on(form_of(kind), device)), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_quantise(device: str, kind: str) -> None:
    from headrace.kernels._triton_rows import launch_quantise

    x = draw(3, 4352) * torch.tensor([[1e-3], [1.0], [1e4]])
    x[0] = 0.0
    got = launch_quantise(x.to(device), on(form_of(kind), device))
    assert_alike(got, quantise_twin(x, form_of(kind)))
    assert got.data.cpu().float().isfinite().all(), "what is too large is saturated"


def test_plain_activations_stay() -> None:
    x = draw(2, 8)
    assert quantise(x, PLAIN).data is x


HEADS = {
    "llama": (4, 2, 16, 16, False, False),
    "partial": (6, 2, 20, 8, False, False),
    "interleaved, with norms": (3, 1, 24, 24, True, True),
    "norms": (5, 5, 64, 64, False, True),
    "no rope": (2, 2, 16, 0, False, False),
    "wide": (2, 1, 256, 256, False, True),
}


def projected(name: str, num_tokens: int, dtype: torch.dtype, device: str) -> Projected:
    heads, kv_heads, dim, rotary, interleaved, has_norms = HEADS[name]
    angles = draw(num_tokens, rotary // 2, seed=1)
    q_norm, k_norm = (
        HeadScale(draw(dim, dtype=dtype, seed=seed).to(device), 1e-5, plus_one)
        for seed, plus_one in ((2, True), (3, False))
    )
    return Projected(
        draw(num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype).to(device),
        heads,
        kv_heads,
        angles.cos().to(device),
        angles.sin().to(device),
        interleaved,
        q_norm if has_norms else None,
        k_norm if has_norms else None,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)],
)
@pytest.mark.parametrize("name", HEADS)
def test_rope_and_write(device: str, dtype: torch.dtype, kv_dtype: torch.dtype, name: str) -> None:
    from headrace.kernels._triton_rope import FEW_TOKENS, launch_rope_write

    scales = {"k_scale": 0.03, "v_scale": 2.0}
    for num_tokens in (3, FEW_TOKENS + 2):
        here, there = projected(name, num_tokens, dtype, "cpu"), projected(name, num_tokens, dtype, device)
        shape = (20, here.num_kv_heads, 4, here.head_dim)
        k, v = (torch.full(shape, float("nan"), dtype=kv_dtype) for _ in "kv")
        far_k, far_v = k.to(device, copy=True), v.to(device, copy=True)
        slots = torch.randperm(80, generator=torch.Generator().manual_seed(4))[:num_tokens]
        wanted = rope_write_twin(here, k, v, slots, **scales)
        got = launch_rope_write(there, far_k, far_v, slots.to(device), **scales)
        assert_alike(Quantised(got), Quantised(wanted))
        for cache, right in ((far_k.cpu(), k), (far_v.cpu(), v)):
            assert torch.equal(cache.isnan(), right.isnan()), "written where it should be, and nowhere else"
            assert_alike(
                Quantised(cache.float().nan_to_num().to(kv_dtype)), Quantised(right.float().nan_to_num().to(kv_dtype))
            )


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, FP8])
def test_the_cpu_kernels_do_the_same(name: str, kv_dtype: torch.dtype) -> None:
    packed, other = (projected(name, 5, torch.float32, "cpu") for _ in range(2))
    shape = (3, packed.num_kv_heads, 4, packed.head_dim)
    caches = [[torch.zeros(shape, dtype=kv_dtype) for _ in "kv"] for _ in range(2)]
    slots = torch.tensor([4, 11, 0, 7, 5])
    q = rope_write(packed, *caches[0], slots, k_scale=0.5, v_scale=3.0)
    wanted = rope_write_twin(other, *caches[1], slots, k_scale=0.5, v_scale=3.0)
    torch.testing.assert_close(q, wanted, atol=1e-5, rtol=1e-5)
    for got, right in zip(*caches):
        torch.testing.assert_close(got.float(), right.float(), atol=1e-5, rtol=0.13 if kv_dtype == FP8 else 0.01)
