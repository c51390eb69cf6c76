"""FP8 products against the dequantised ones, for every kind of scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.fp8_linear import dequantised_weight, fp8_linear, fp8_linear_twin
from headrace.kernels.gated_linear import can_fuse, gated_linear_twin
from headrace.kernels.quantise import FP8, Form, Quantised, quantise_twin
from tests.kits.interpreter import DEVICES


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(kind: Any, num_rows: int, num_out: int, num_in: int) -> tuple[Quantised, Tensor, Tensor]:
    """Activations, weight and scales of a kind: `static`, `token` (by output too), `group` (by block too)."""
    act = quantise_twin(draw(num_rows, num_in), Form(kind, torch.tensor([0.02]) if kind == "static" else None))
    shapes = {"static": (1,), "token": (num_out, 1), "group": (-(-num_out // 128), -(-num_in // 128))}
    return act, (draw(num_out, num_in, seed=1) * 20).to(FP8), draw(*shapes[kind], seed=2).abs() + 0.1


def moved(act: Quantised, device: str) -> Quantised:
    assert act.scales is not None
    return Quantised(act.data.to(device), act.scales.to(device))


def assert_close(out: Tensor, wanted: Tensor) -> None:
    error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 5e-3, f"relative error {error:.1e}"


def test_dequantised() -> None:
    weight, scales = torch.ones(130, 256).to(FP8), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    wide = dequantised_weight(weight, scales)
    assert wide[127, 127] == 1 and wide[0, 128] == 2 and wide[129, 0] == 3 and wide[128, 255] == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 3, 20])
@pytest.mark.parametrize("kind", ["static", "token"])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 512), (50, 200), (7, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows(device: str, num_rows: int, kind: str, num_out: int, num_in: int, has_bias: bool) -> None:
    from headrace.kernels._triton_linear import launch_few_rows

    act, weight, scales = case(kind, num_rows, num_out, num_in)
    bias = draw(num_out, seed=3).bfloat16() if has_bias else None
    wanted = fp8_linear_twin(act, weight, scales, bias, out_dtype=torch.float32)
    out = launch_few_rows(
        moved(act, device),
        weight.to(device),
        scales.to(device),
        None if bias is None else bias.to(device),
        out_dtype=torch.bfloat16,
    )
    assert out.dtype == torch.bfloat16
    assert_close(out, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 20, 70])
def test_blocks(device: str, num_rows: int) -> None:
    from headrace.kernels._triton_linear import launch_blocks

    act, weight, scales = case("group", num_rows, 200, 384)
    out = launch_blocks(moved(act, device), weight.to(device), scales.to(device), None, out_dtype=torch.bfloat16)
    assert_close(out, fp8_linear_twin(act, weight, scales, out_dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["static", "token", "group"])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 40, 100, 101, 300])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_any_rows_on_a_gpu(kind: str, num_rows: int, out_dtype: torch.dtype) -> None:
    act, weight, scales = case(kind, num_rows, 384, 512)
    bias = draw(384, seed=3).to(out_dtype)
    out = fp8_linear(moved(act, "cuda"), weight.cuda(), scales.cuda(), bias.cuda(), out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_close(out, fp8_linear_twin(act, weight, scales, bias, out_dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 32, 33, 64])
@pytest.mark.parametrize("num_out", [512, 4096, 7168, 16384])
def test_few_rows_with_block_scales_on_a_gpu(num_rows: int, num_out: int) -> None:
    act, weight, scales = case("group", num_rows, num_out, 768)
    out = fp8_linear(moved(act, "cuda"), weight.cuda(), scales.cuda(), out_dtype=torch.bfloat16)
    assert_close(out, fp8_linear_twin(act, weight, scales, out_dtype=torch.float32))


@pytest.mark.parametrize("room", [99 << 10, 227 << 10])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 33, 64])
def test_tiles_fit_in_shared_memory(num_rows: int, by_block: bool, room: int) -> None:
    """Of an RTX 4090 and of an H200."""
    from headrace.kernels import _triton_linear as linear

    for num_out in (64, 2112, 4096, 6144, 10240, 24576, 36864):
        for num_in in (512, 1536, 2048, 7168, 18432):
            wanted = (linear.tuned_blocks if by_block else linear.tuned)(num_rows, num_out, num_in)
            tuning = linear.with_room(wanted, num_rows, room)
            assert tuning == wanted or room < 227 << 10
            narrow = tuning.parts * max(linear.NARROW_SIDE // tuning.parts, linear.power_of_2(num_rows))
            assert (linear.WIDE_SIDE + narrow) * tuning.inputs * tuning.stages <= room, (num_out, num_in, tuning)
            assert num_in % (tuning.inputs * tuning.parts) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [97, 98, 99])
def test_products_of_the_vendor_take_any_number_of_rows(num_rows: int) -> None:
    """It multiplies rows in fours: those behind the last belong to nobody, whatever they are."""
    act, weight, scales = case("group", num_rows, 8192, 512)
    assert act.scales is not None
    wanted = fp8_linear_twin(act, weight, scales, out_dtype=torch.float32)
    room = Form("group").new_data(num_rows, 512, torch.bfloat16, torch.device("cuda"))
    room.as_strided((100, 512), (512, 1)).fill_(float("nan"))
    room.copy_(act.data)
    for data in (room, act.data.cuda()):
        out = fp8_linear(Quantised(data, act.scales.cuda()), weight.cuda(), scales.cuda(), out_dtype=torch.bfloat16)
        assert out.shape == (num_rows, 8192)
        assert_close(out, wanted)


@pytest.mark.gpu
def test_static_activations_with_scales_by_output_on_a_gpu() -> None:
    act, weight, _ = case("static", 40, 384, 512)
    scales = draw(384, 1, seed=5).abs() + 0.1
    out = fp8_linear(moved(act, "cuda"), weight.cuda(), scales.cuda(), out_dtype=torch.bfloat16)
    assert_close(out, fp8_linear_twin(act, weight, scales, out_dtype=torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 5, 16])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_pieces_of_a_row_beside_one_another(device: str, num_rows: int, parts: int) -> None:
    from headrace.kernels._triton_linear import StreamTuning, launch_stream

    act, weight, scales = case("token", num_rows, 128, 1024)
    bias = draw(128, seed=4)
    wanted = fp8_linear_twin(act, weight, scales, bias, out_dtype=torch.float32)
    out = launch_stream(
        moved(act, device),
        weight.to(device),
        scales.to(device),
        bias.to(device),
        out_dtype=torch.float32,
        tuning=StreamTuning(parts=parts),
    )
    assert_close(out, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 40])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_pieces_of_rows_with_block_scales(device: str, num_rows: int, parts: int) -> None:
    from headrace.kernels._triton_linear import StreamTuning, launch_stream

    act, weight, scales = case("group", num_rows, 320, 1024)
    bias = draw(320, seed=4)
    wanted = fp8_linear_twin(act, weight, scales, bias, out_dtype=torch.float32)
    out = launch_stream(
        moved(act, device),
        weight.to(device),
        scales.to(device),
        bias.to(device),
        out_dtype=torch.float32,
        by_block=True,
        tuning=StreamTuning(inputs=128, parts=parts, stages=3),
    )
    assert_close(out, wanted)


def test_forms_are_values() -> None:
    assert replace(Form("group"), group=64) == Form("group", group=64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("kind", "out_kind"), [("static", "static"), ("token", "plain"), ("static", "plain")])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(device: str, num_rows: int, kind: str, out_kind: Any, activation: Any) -> None:
    """Up to one step of FP8: sums are added in another order, then rounded. Gates are about 1, where errors show."""
    from headrace.kernels._triton_linear import launch_gated

    act, weight, scales = case(kind, num_rows, 128, 512)
    scales = scales / 400
    form = Form(out_kind, torch.tensor([0.5]) if out_kind == "static" else None)
    wanted = gated_linear_twin(act, weight, scales, activation, form=form, dtype=torch.bfloat16)
    assert can_fuse(act, weight, scales, form=form)
    there = Form(out_kind, None if form.scale is None else form.scale.to(device))
    out = launch_gated(
        moved(act, device), weight.to(device), scales.to(device), activation, form=there, dtype=torch.bfloat16
    )
    assert out.data.dtype == wanted.data.dtype and (out.scales is None) == (wanted.scales is None)
    error = (out.data.cpu().double() - wanted.data.double()).abs()
    assert bool((error <= wanted.data.double().abs() * (0.13 if out_kind == "static" else 0.02) + 1e-2).all())
