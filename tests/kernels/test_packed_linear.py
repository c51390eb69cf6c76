from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from headrace.kernels._native import library
from headrace.kernels.packed_linear import pack, packed_linear, packed_linear_twin, packed_rows

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(16, 16), (7, 3), (65, 97), (300, 33), (513, 64), (576, 130)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_equals_the_twin_in_float64(shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    weight, bias = draw(shape[1], shape[0], dtype=weight_dtype), draw(shape[1], seed=1)
    packed = pack(weight, weight_dtype)
    assert torch.equal(packed_rows(packed, torch.arange(shape[1])), weight)
    for num_rows, added in itertools.product((1, 2, 5, 13, 50), (None, bias)):
        x = draw(num_rows, shape[0], dtype=dtype, seed=2)
        out = packed_linear(x, packed, added, out_dtype=torch.float32)
        wanted = packed_linear_twin(x, packed, added, out_dtype=torch.float32)
        torch.testing.assert_close(out, wanted, atol=3e-6 * shape[0] ** 0.5, rtol=1e-5)
        # One rounding, at the end.
        assert torch.equal(packed_linear(x, packed, added), out.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(65, 97), (576, 130)])
def test_a_row_is_the_same_in_any_batch_and_on_any_threads(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = pack(draw(shape[1], shape[0]), dtype)
    x = draw(150, shape[0], dtype=dtype, seed=1)
    expected = packed_linear(x, packed)
    for count in (*range(1, 30), 47, 48, 49, 95, 97, 149):
        assert torch.equal(packed_linear(x[:count], packed), expected[:count]), count
        assert torch.equal(packed_linear(x[-count:], packed), expected[-count:]), count
    torch.set_num_threads(2)
    for count in (1, 3, 150):
        assert torch.equal(packed_linear(x[:count], packed), expected[:count]), count


def test_other_dtypes_and_strides_are_taken() -> None:
    weight = draw(40, 24, dtype=torch.float16)
    packed = pack(weight.t().contiguous().t(), torch.float32)
    assert torch.equal(packed_rows(packed, torch.tensor([3, 39, 3])), weight[[3, 39, 3]].float())
    x = draw(6, 48, dtype=torch.float16, seed=1)[:, ::2]
    out = packed_linear(x, packed)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, packed_linear_twin(x, packed), atol=1e-2, rtol=1e-3)


def test_no_rows() -> None:
    assert packed_linear(draw(0, 8), pack(draw(5, 8), torch.float32)).shape == (0, 5)
