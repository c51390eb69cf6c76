from __future__ import annotations

import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._native import library
from headrace.quant.none import Dense, choose_product


class Act(NamedTuple):
    data: Tensor
    scales: Tensor | None = None


@pytest.mark.parametrize(
    ("dtype", "device_type", "packs", "features", "wanted"),
    [
        (torch.bfloat16, "cpu", True, set(), "packed_bfloat16"),
        (torch.float32, "cpu", True, set(), "packed_float32"),
        (torch.float16, "cpu", True, set(), "packed_float32"),
        (torch.bfloat16, "cpu", False, {"avx512_bf16"}, "torch"),
        (torch.bfloat16, "cpu", False, {"avx2"}, "torch_float32"),
        (torch.float16, "cpu", False, {"avx512_bf16"}, "torch_float32"),
        (torch.float32, "cpu", False, {"avx2"}, "torch"),
        (torch.bfloat16, "cuda", True, {"avx2"}, "torch"),
    ],
)
def test_choice(dtype: torch.dtype, device_type: str, packs: bool, features: set[str], wanted: str) -> None:
    assert choose_product(dtype, device_type=device_type, packs=packs, features=frozenset(features)) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_multiplies_as_torch_does(dtype: torch.dtype, has_bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(45, 70, generator=draw).to(dtype)
    bias = torch.randn(45, generator=draw).to(dtype) if has_bias else None
    x = torch.randn(9, 70, generator=draw).to(dtype)
    recipe = Dense()
    prepared = recipe.prepare(weight.clone(), bias)
    assert (prepared.out_features, prepared.in_features) == (45, 70)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    out = recipe.linear(Act(x), prepared)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, atol=10 * tolerance, rtol=tolerance)
    wide = recipe.linear(Act(x), prepared, out_dtype=torch.float32)
    torch.testing.assert_close(wide.double(), wanted, atol=1e-4, rtol=1e-4)
    ids = torch.tensor([44, 0, 0, 17])
    assert torch.equal(recipe.rows(prepared, ids), weight[ids])


@pytest.mark.skipif(library() is None, reason="no C compiler: the original is what is held")
def test_a_packed_weight_keeps_no_second_copy() -> None:
    weight = torch.randn(64, 128)
    original = weakref.ref(weight)
    prepared = Dense().prepare(weight, None)
    del weight
    assert original() is None
    assert prepared.size_bytes == 64 * 128 * 4
