"""The gate and norm behind a scan: both orders against their definition in float64, the kernel against the twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.gated_norm import Ranks, gated_norm, gated_norm_twin
from headrace.kernels.quantise import FP8, PLAIN, Form
from tests.kits.interpreter import DEVICES
from tests.kits.recurrent import normal

EPS = 1e-3
DTYPES = [torch.float32, torch.bfloat16]
CASES = [(1, 3, 24), (5, 1, 40), (33, 3, 128), (2, 9, 128), (3, 1, 2500)]
"""Tokens, groups, features of a group."""


def case_of(sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """-> (x, a gate that lies in a wider product, weights by group)"""
    tokens, groups, dim = sizes
    packed = normal(tokens, groups * dim + 24, seed=1).to(dtype).to(device)
    return (
        normal(*sizes, seed=2).to(device) * 3,
        packed[:, 8 : 8 + groups * dim].unflatten(1, (groups, dim)),
        normal(groups, dim, seed=3).to(dtype).to(device),
    )


def defined(x: Tensor, gate: Tensor, weight: Tensor | None, act: str, is_gated_first: bool) -> Tensor:
    x, gate = x.double(), gate.double()
    active = gate.sigmoid() * (gate if act == "silu" else 1.0)
    x = x * active if is_gated_first else x
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return (x if is_gated_first else x * active).flatten(1)


@pytest.mark.parametrize("weights", ["by group", "one", "none"])
@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
def test_twin_is_the_definition(act: Any, is_gated_first: bool, weights: str) -> None:
    x, gate, by_group = case_of((4, 3, 24), torch.float32)
    weight = {"by group": by_group, "one": by_group[0], "none": None}[weights]
    got = gated_norm(x, gate, weight, EPS, act=act, is_gated_first=is_gated_first)
    assert got.scales is None and got.data.dtype == torch.float32
    wanted = defined(x, gate, weight, act, is_gated_first)
    torch.testing.assert_close(got.data.double(), wanted, atol=1e-6, rtol=1e-5)


def check_ranks(run: Any, device: str, *, is_gated_first: bool) -> None:
    """Two ranks that each have half of the only group's features make what one makes of all."""
    x, gate, weight = case_of((5, 1, 48), torch.float32)
    whole = gated_norm_twin(x, gate, weight, EPS, is_gated_first=is_gated_first).data
    squares = x * torch.nn.functional.silu(gate) if is_gated_first else x
    squares, seen = squares.square().sum(-1, keepdim=True).to(device), []

    def add(own: Tensor) -> Tensor:
        seen.append(own)
        return squares

    for cut in (slice(0, 24), slice(24, 48)):
        own = x[..., cut].contiguous().to(device), gate.to(device)[..., cut], weight[..., cut].contiguous().to(device)
        got = run(*own, EPS, is_gated_first=is_gated_first, ranks=Ranks(add, 2)).data
        torch.testing.assert_close(got.cpu(), whole[:, cut], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen[0] + seen[1], squares, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_gated_first", [False, True])
def test_ranks_share_a_group(is_gated_first: bool) -> None:
    check_ranks(gated_norm, "cpu", is_gated_first=is_gated_first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_gated_first", [False, True])
def test_triton_ranks_share_a_group(is_gated_first: bool, device: str) -> None:
    from headrace.kernels._triton_rows import launch_gated_norm

    check_ranks(launch_gated_norm, device, is_gated_first=is_gated_first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
def test_triton(act: Any, is_gated_first: bool, dtype: torch.dtype, device: str) -> None:
    from headrace.kernels._triton_rows import launch_gated_norm

    for sizes in CASES:
        x, gate, by_group = case_of(sizes, dtype)
        on_x, on_gate, on_weight = case_of(sizes, dtype, device)
        for weight, own in ((by_group, on_weight), (by_group[0], on_weight[0]), (None, None)):
            wanted = gated_norm_twin(x, gate, weight, EPS, act=act, is_gated_first=is_gated_first)
            got = launch_gated_norm(on_x, on_gate, own, EPS, act=act, is_gated_first=is_gated_first)
            assert got.scales is None and got.data.dtype == dtype and got.data.shape == wanted.data.shape
            out, right = got.data.cpu().float(), wanted.data.float()
            torch.testing.assert_close(out, right, atol=2e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)
            assert dtype == torch.float32 or (out != right).float().mean() < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["static", "token", "group"])
def test_triton_quantises(kind: Any, dtype: torch.dtype, device: str) -> None:
    """Equal to the twin's but for what lay between two FP8 numbers."""
    from headrace.kernels._triton_rows import launch_gated_norm

    scale = torch.tensor([0.013]) if kind == "static" else None
    for sizes in ((5, 3, 128), (2, 1, 384), (3, 4, 64)):
        x, gate, weight = case_of(sizes, dtype)
        wanted = gated_norm_twin(x, gate, weight, EPS, form=Form(kind, scale))
        form = Form(kind, None if scale is None else scale.to(device))
        got = launch_gated_norm(*case_of(sizes, dtype, device), EPS, form=form)
        assert got.data.dtype == FP8 and got.scales is not None and wanted.scales is not None
        torch.testing.assert_close(got.scales.cpu(), wanted.scales, atol=0, rtol=1e-2)
        out, right = got.data.cpu().float(), wanted.data.float()
        torch.testing.assert_close(out, right, atol=2**-8, rtol=2**-3)
        assert (out != right).float().mean() < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_triton_of_no_tokens_and_of_rows_by_themselves(device: str) -> None:
    from headrace.kernels._triton_rows import launch_gated_norm

    x, gate, weight = case_of((7, 3, 40), torch.bfloat16, device)
    assert launch_gated_norm(x[:0], gate[:0], weight, EPS, form=PLAIN).data.shape == (0, 120)
    whole = launch_gated_norm(x, gate, weight, EPS).data
    assert torch.equal(launch_gated_norm(x[4:5], gate[4:5], weight, EPS).data, whole[4:5])
