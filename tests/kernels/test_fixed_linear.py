"""Products with one order of sums: right, and a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.fixed_linear import fixed_linear, fixed_linear_twin
from headrace.kernels.quantise import FP8, Form, Quantised, quantise_twin
from tests.kits.interpreter import DEVICES, ordered_sums  # noqa: F401 (a fixture)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(kind: str, num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[Quantised, Tensor, Any]:
    """Activations, weight, scales: plain ones of `dtype`, or FP8 with scales by row and output, or by block."""
    x, weight = draw(num_rows, num_in), draw(num_out, num_in, seed=1)
    if kind == "plain":
        return Quantised(x.to(dtype)), weight.to(dtype), None
    shape = (num_out, 1) if kind == "token" else (-(-num_out // 128), -(-num_in // 128))
    return quantise_twin(x, Form(kind)), (weight * 20).to(FP8), draw(*shape, seed=2).abs() + 0.1  # pyright: ignore[reportArgumentType]


def run(act: Quantised, weight: Tensor, scales: Tensor | None, bias: Tensor | None, device: str) -> Tensor:
    moved = Quantised(act.data.to(device), None if act.scales is None else act.scales.to(device))
    scales = None if scales is None else scales.to(device)
    bias = None if bias is None else bias.to(device)
    return fixed_linear(moved, weight.to(device), scales, bias, out_dtype=torch.float32).cpu()


def part(act: Quantised, start: int, stop: int) -> Quantised:
    return Quantised(act.data[start:stop], None if act.scales is None else act.scales[start:stop])


@pytest.mark.usefixtures("ordered_sums")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "num_out", "num_in"), [("plain", 70, 130), ("token", 64, 256), ("group", 130, 256)])
def test_right_and_the_same_bits_in_any_batch(device: str, kind: str, num_out: int, num_in: int) -> None:
    act, weight, scales = case(kind, 70, num_out, num_in, torch.float32)
    bias = draw(num_out, seed=3)
    out = run(act, weight, scales, bias, device)
    wanted = fixed_linear_twin(act, weight, scales, bias, out_dtype=torch.float32)
    assert (out - wanted).norm() / wanted.norm() < (5e-3 if scales is not None else 1e-5)
    for start, stop in ((0, 1), (69, 70), (3, 20), (10, 70)):
        assert torch.equal(run(part(act, start, stop), weight, scales, bias, device), out[start:stop]), (start, stop)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_ones(dtype: torch.dtype) -> None:
    act, weight, _ = case("plain", 300, 1000, 4096, dtype)
    out = run(act, weight, None, None, "cuda")
    wanted = fixed_linear_twin(act, weight, None, out_dtype=torch.float32)
    assert (out - wanted).norm() / wanted.norm() < 1e-3
    for count in (1, 2, 17, 64, 299):
        assert torch.equal(run(part(act, 0, count), weight, None, None, "cuda"), out[:count]), count
