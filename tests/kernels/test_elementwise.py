"""Norm, rope, gated activation and cache write: the compiled kernels against their torch twins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.act_mul import act_mul, act_mul_twin
from headrace.kernels.kv_write import kv_write, kv_write_twin
from headrace.kernels.rms_norm import rms_norm, rms_norm_twin
from headrace.kernels.rope import apply_rope, apply_rope_twin

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 16, 33, 83, 576]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounds_alike(out: Tensor, wanted: Tensor) -> None:
    """float32: a few units in the last place. bfloat16: equal but for rare values that lay between two."""
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=2e-6)
    else:
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=2**-7)
        assert ((out - wanted).abs() > 1e-6).sum() <= 1 + 0.02 * out.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (draw(5, width, dtype=dtype, seed=seed) for seed in range(3))
    for added, plus_one in itertools.product((None, residual), (False, True)):
        out, wanted = (f(x, weight[0], 1e-5, residual=added, plus_one=plus_one) for f in (rms_norm, rms_norm_twin))
        if added is None:
            out, wanted = (out, None), (wanted, None)
        assert_rounds_alike(out[0], wanted[0])
        assert added is None or torch.equal(out[1], wanted[1])


def test_norm_of_half_values_takes_a_wide_weight() -> None:
    x, weight = draw(3, 40, dtype=torch.bfloat16), draw(40, seed=1)
    out, wanted = rms_norm(x, weight, 1e-6), rms_norm_twin(x, weight, 1e-6)
    assert isinstance(out, Tensor) and isinstance(wanted, Tensor)
    assert_rounds_alike(out, wanted)


def test_norm_takes_strided_rows_and_leaves_its_inputs_alone() -> None:
    wide = draw(4, 100)
    before = wide.clone()
    x, weight = wide[:, 10:74], draw(64, seed=1)
    out, summed = rms_norm(x, weight, 1e-5, residual=wide[:, 36:])
    wanted, wanted_sum = rms_norm_twin(x.clone(), weight, 1e-5, residual=wide[:, 36:].clone())
    assert_rounds_alike(out, wanted)
    assert torch.equal(summed, wanted_sum) and torch.equal(wide, before)


@pytest.mark.parametrize("kernel", ["norm", "act_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_batch_and_on_any_threads(kernel: str, dtype: torch.dtype) -> None:
    x, weight = draw(300, 130, dtype=dtype), draw(130, dtype=dtype, seed=1)

    def run(rows: Tensor) -> Any:
        return rms_norm(rows, weight, 1e-5) if kernel == "norm" else act_mul(rows, "silu")

    expected = run(x)
    for start, stop in ((0, 1), (7, 9), (100, 300)):
        assert torch.equal(run(x[start:stop]), expected[start:stop])
    torch.set_num_threads(2)
    assert torch.equal(run(x), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 20), (64, 64), (80, 32), (6, 2)])
def test_rope_has_the_twins_bits(dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    fused = draw(9, 7, head_dim, dtype=dtype)
    q, k, v = fused.clone().split([4, 2, 1], 1)
    angles = draw(9, rotary_dim // 2, seed=1)
    out = apply_rope(q, k, angles.cos(), angles.sin(), interleaved=interleaved)
    wanted = apply_rope_twin(*fused.split([4, 2, 1], 1)[:2], angles.cos(), angles.sin(), interleaved=interleaved)
    for got, right in zip(out, wanted, strict=True):
        assert torch.equal(got, right)
        assert torch.equal(got[..., rotary_dim:], right[..., rotary_dim:])
    assert torch.equal(v, fused[:, 6:])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_act_mul(dtype: torch.dtype, width: int, kind: Any) -> None:
    x = draw(4, 2 * width, dtype=dtype) * 3
    # The twin in float64: torch's own float32 forms cancel where the gate is very negative.
    gate, up = x.double().chunk(2, 1)
    wanted = act_mul_twin(torch.cat([gate, torch.ones_like(up)], 1), kind).to(dtype) * up.to(dtype)
    assert_rounds_alike(act_mul(x, kind), wanted)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu"])
def test_act_mul_of_extreme_gates(kind: Any) -> None:
    gate = torch.tensor([[-torch.inf, -1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 1e30, float("nan"), 1e-40]])
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    wanted = act_mul_twin(x, kind)
    torch.testing.assert_close(act_mul(x, kind), wanted, equal_nan=True, atol=1e-35, rtol=1e-6)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        act_mul(draw(2, 4), "swish")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_kv_write(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    num_blocks, block_size, heads, dim = 6, 4, 3, 21
    k, v = draw(7, 2 * heads, dim, dtype=dtype).split(heads, 1)
    slots = torch.tensor([23, 4, 5, 17, 9, 0, 11])
    caches = [
        [torch.full((num_blocks, heads, block_size, dim), float("nan"), dtype=cache_dtype) for _ in "kv"]
        for _ in range(2)
    ]
    kv_write(k, v, *caches[0], slots, block_size)
    kv_write_twin(k, v, *caches[1], slots, block_size)
    for out, wanted in zip(*caches, strict=True):
        assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.nan_to_num(), wanted.nan_to_num())
    assert torch.equal(caches[0][0][17 // 4, :, 17 % 4], k[3].to(cache_dtype))


def test_half_values_round_to_nearest_even() -> None:
    """All float32 patterns of interest go through the cache write as torch converts them."""
    edges = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, float("nan"), 3.4e38, 1e-45, 1.00390625, 1.01171875])
    bits = torch.randint(-(2**31), 2**31 - 1, (4096 - len(edges),), generator=torch.Generator().manual_seed(0))
    values = torch.cat([edges, bits.to(torch.int32).view(torch.float32)]).reshape(64, 1, 64)
    cache = [torch.zeros(64, 1, 1, 64, dtype=torch.bfloat16) for _ in "kv"]
    kv_write(values, values, *cache, torch.arange(64), 1)
    torch.testing.assert_close(cache[0].view(64, 1, 64), values.bfloat16(), equal_nan=True, atol=0, rtol=0)
