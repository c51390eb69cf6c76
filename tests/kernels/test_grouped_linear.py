from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from headrace.kernels._native import library
from headrace.kernels.grouped_linear import (
    GroupedCodes,
    grouped_linear,
    grouped_linear_twin,
    grouped_rows,
    pack_codes,
)

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

SHAPES = [(32, 5), (96, 33), (64, 16), (320, 70)]
KINDS = list(itertools.product((4, 8), (16, 32), (False, True), (False, True)))
"""bits, group, scales that fit float16, offsets"""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_codes(
    out_features: int, in_features: int, bits: int = 4, group: int = 32, fits_half: bool = True, has_offset: bool = True
) -> GroupedCodes:
    generator = torch.Generator().manual_seed(bits + group)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (out_features, in_features), generator=generator).to(dtype)
    scales = draw(out_features, in_features // group, seed=1)
    offsets = draw(out_features, in_features // group, seed=2) if has_offset else None
    if fits_half:
        scales, offsets = scales.half().float(), None if offsets is None else offsets.half().float()
    return GroupedCodes(codes, scales, offsets)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_holds_the_codes_and_equals_the_twin(shape: tuple[int, int], kind: tuple[int, int, bool, bool]) -> None:
    codes = draw_codes(shape[1], shape[0], *kind)
    weight = pack_codes(codes)
    bits, group, fits_half, has_offset = kind
    assert (weight.bits, weight.group, weight.scale_is_half, weight.has_offset) == (bits, group, fits_half, has_offset)
    torch.testing.assert_close(grouped_rows(weight, torch.arange(shape[1])), codes.weight(), atol=1e-6, rtol=1e-6)
    bias = draw(shape[1], seed=3)
    for num_rows, added in ((1, None), (2, bias), (5, bias), (40, None)):
        x = draw(num_rows, shape[0], seed=4)
        scale = codes.weight().abs().max() * shape[0] ** 0.5
        torch.testing.assert_close(
            grouped_linear(x, weight, added) / scale,
            grouped_linear_twin(x, weight, added) / scale,
            atol=2e-6,
            rtol=1e-5,
        )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_extreme_codes_do_not_overflow(kind: tuple[int, int, bool, bool]) -> None:
    codes = draw_codes(20, 64, *kind)
    extreme = torch.tensor([0, 15], dtype=torch.uint8) if kind[0] == 4 else torch.tensor([-128, 127], dtype=torch.int8)
    for code in extreme:
        weight = pack_codes(GroupedCodes(torch.full_like(codes.codes, int(code)), codes.scales, codes.offsets))
        for sign in (-1.0, 1.0):
            x = torch.full((5, 64), sign)
            out, wanted = grouped_linear(x, weight), grouped_linear_twin(x, weight)
            torch.testing.assert_close(out, wanted, atol=1e-2, rtol=1e-5)


def test_the_rounding_of_activations_is_small() -> None:
    codes = draw_codes(64, 1024)
    x = draw(8, 1024, seed=5)
    out, exact = grouped_linear(x, pack_codes(codes)), x @ codes.weight().t()
    assert (out - exact).norm() / exact.norm() < 0.008


def test_what_is_not_finite_is_not_hidden() -> None:
    weight = pack_codes(draw_codes(20, 96))
    x = draw(4, 96)
    x[1, 40], x[2, 70], x[3] = torch.nan, torch.inf, 0.0
    out = grouped_linear(x, weight)
    assert out[0].isfinite().all() and not out[1:3].isfinite().any() and (out[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_in_any_batch_and_on_any_threads(bits: int, dtype: torch.dtype) -> None:
    weight = pack_codes(draw_codes(130, 608, bits))
    x = draw(110, 608, dtype=dtype, seed=1)
    expected = grouped_linear(x, weight)
    for threads, counts in ((1, (*range(1, 20), 47, 48, 49, 97)), (2, (1, 3, 110))):
        torch.set_num_threads(threads)
        for count in counts:
            assert torch.equal(grouped_linear(x[:count], weight), expected[:count]), count
            assert torch.equal(grouped_linear(x[-count:], weight), expected[-count:]), count
