"""Mamba-2's state space: chunks, pieces and steps against a token at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.ssd import CHUNK, ssd, ssd_twin
from tests.kits.interpreter import DEVICES
from tests.kits.recurrent import SLOTS, in_states, normal, step_of, walk

ROWS: dict[str, tuple[list[int], int]] = {
    "decode": ([1, 1, 1], 0),
    "one prompt": ([19], 1),
    "prompts and decode": ([18, 1, 33, 1, 1], 3),
    "longer than a chunk": ([CHUNK + 7, 1], 1),
}
"""By name, (tokens of each row, context rows)."""
TRITON_ROWS: dict[str, tuple[list[int], int]] = {
    "decode": ([1, 1, 1], 0),
    "around a chunk": ([1, 15, 31, 32, 65, 1, 1], 5),
    "a piece a chunk": ([170, 33, 1], 2),
}
USUAL = (2, 64, 1, 128)
"""Sizes whose masks are true everywhere."""
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-4}
"""Of what is of the order of one, by the model's type, where nothing is rounded once for outputs."""


def case_of(
    num_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int, int] = (4, 10, 2, 6),
    decay: Tensor | None = None,
) -> dict[str, Tensor]:
    """sizes: heads, their features, groups, the state's size. Packed as a layer's convolution leaves it."""
    heads, dim, groups, size = sizes
    packed = normal(num_tokens, heads * dim + 2 * groups * size, seed=9).to(dtype)
    x, b, c = packed.split((heads * dim, groups * size, groups * size), 1)
    return {
        "x": x.unflatten(1, (heads, dim)),
        "b": b.unflatten(1, (groups, size)),
        "c": c.unflatten(1, (groups, size)),
        "time": normal(num_tokens, heads, seed=10).abs(),
        "decay": -normal(num_tokens, heads, seed=11).abs() * 0.3 if decay is None else decay,
        "skip": normal(heads, seed=13),
        "state": normal(SLOTS, heads, dim, size, seed=12),
    }


def one_by_one(case: dict[str, Tensor], lengths: Sequence[int], num_context: int) -> tuple[Tensor, Tensor]:
    """-> (outputs, states), in float64."""
    wide = {part: tensor.double() for part, tensor in case.items()}
    each = wide["x"].shape[1] // wide["b"].shape[1]
    b, c = (wide[part].repeat_interleave(each, 1) for part in ("b", "c"))

    def one(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * wide["decay"][token].exp()[:, None, None]
        state = state + torch.einsum("h,hd,hs->hds", wide["time"][token], wide["x"][token], b[token])
        return torch.einsum("hds,hs->hd", state, c[token]) + wide["skip"][:, None] * wide["x"][token], state

    states = wide["state"].clone()
    return walk(lengths, step_of(lengths, num_context).slots, states, one), states


@pytest.mark.parametrize("rows", ROWS)
def test_twin_equals_a_token_at_a_time(rows: str) -> None:
    lengths, num_context = ROWS[rows]
    case = case_of(sum(lengths))
    expected, states = one_by_one(case, lengths, num_context)
    got = ssd(**case, step=step_of(lengths, num_context))
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(case["state"].double(), states, atol=2e-5, rtol=1e-4)


def check_triton(case: dict[str, Tensor], lengths: Sequence[int], num_context: int, device: str) -> None:
    """Against the walk, and against the twin with the states rounded as they are."""
    from headrace.kernels._triton_ssd import launch_ssd

    expected, states = one_by_one(case, lengths, num_context)
    twin = {part: tensor.clone() for part, tensor in case.items()}
    ssd_twin(**twin, step=step_of(lengths, num_context))
    there = {part: tensor.to(device) for part, tensor in case.items()}
    there["state"] = in_states(case["state"]).to(device)
    got = launch_ssd(**there, step=step_of(lengths, num_context, device))
    tolerance = TOLERANCES[case["x"].dtype] * max(1.0, float(expected.square().mean().sqrt()))
    torch.testing.assert_close(got.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    if case["state"].dtype != torch.float32:
        tolerance = 2e-2
    torch.testing.assert_close(there["state"].cpu().double(), states, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(there["state"].cpu(), twin["state"], atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What outputs come of is two bfloat16 numbers too, so that little is put down to rounding."""
    if find_spec("triton") is not None:
        set_out_terms(monkeypatch, 2)


def set_out_terms(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from headrace.kernels import _triton_ssd

    for name in ("HALVES", "LARGE_HALVES"):
        monkeypatch.setattr(_triton_ssd, name, getattr(_triton_ssd, name)._replace(out_terms=count))
    monkeypatch.setitem(_triton_ssd.TILINGS, torch.bfloat16, _triton_ssd.HALVES)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels read before they write it is no number."""
    empty = torch.empty

    def nothing(*sizes: Any, **options: Any) -> Tensor:
        made = empty(*sizes, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nothing)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, (2, 10, 1, 6)),
        (torch.bfloat16, (4, 24, 2, 40)),
        (torch.bfloat16, (1, 80, 1, 16)),
        (torch.bfloat16, USUAL),
        (torch.float16, (1, 24, 1, 16)),
    ],
)
@pytest.mark.parametrize("rows", TRITON_ROWS)
def test_in_triton(device: str, rows: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    lengths, num_context = TRITON_ROWS[rows]
    check_triton(case_of(sum(lengths), dtype=dtype, sizes=sizes), lengths, num_context, device)


@pytest.mark.parametrize("device", DEVICES)
def test_states_in_16_bits(device: str) -> None:
    case = case_of(131, dtype=torch.bfloat16, sizes=USUAL)
    case["state"] = case["state"].bfloat16()
    check_triton(case, [130, 1], 1, device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
def test_pieces_of_several_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of three pieces of two chunks beside rows of one; rows are found two at a time."""
    from headrace.kernels import _triton_ssd

    lengths = [3, 160, 33, 1]
    case = case_of(sum(lengths), dtype=torch.bfloat16, sizes=USUAL)
    monkeypatch.setattr(_triton_ssd, "PROGRAMS", 8)
    if device == "cpu":  # compiled kernels keep what they were compiled with
        monkeypatch.setattr(_triton_ssd, "ROW_BLOCK", type(_triton_ssd.ROW_BLOCK)(2))
    assert _triton_ssd.piece_tokens(sum(lengths), 2, chunk=32, widest=1000) == 64
    check_triton(case, lengths, 3, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.0, -50.0])
def test_decays_at_both_ends(device: str, decay: float) -> None:
    """A sum of decays over a chunk goes to -3,200: its inverse is no number."""
    case = case_of(140, dtype=torch.bfloat16, sizes=USUAL, decay=torch.full((140, 2), decay))
    check_triton(case, [140], 1, device)


@pytest.mark.parametrize("device", DEVICES)
def test_step_sizes_of_zero_add_nothing(device: str) -> None:
    case = case_of(70, dtype=torch.bfloat16, sizes=USUAL)
    case["time"] = torch.zeros_like(case["time"])
    check_triton(case, [69, 1], 1, device)


@pytest.mark.parametrize("device", DEVICES)
def test_large_states(device: str) -> None:
    check_triton(case_of(40, dtype=torch.bfloat16, sizes=(2, 64, 1, 256)), [39, 1], 1, device)


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_lose_less_than_inputs_did(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one chunk; the last one's state is kept, and as good as ever."""
    set_out_terms(monkeypatch, 1)
    from headrace.kernels._triton_ssd import launch_ssd

    lengths, slot = [200], 5
    exact, case = (case_of(200, dtype=dtype, sizes=USUAL) for dtype in (torch.float32, torch.bfloat16))
    (wanted, _), (expected, states) = one_by_one(exact, lengths, 1), one_by_one(case, lengths, 1)
    there = {part: tensor.to(device) for part, tensor in case.items()}
    got = launch_ssd(**there, step=step_of(lengths, 1, device)).cpu()
    assert (got - expected).norm() < 0.7 * (expected - wanted).norm()
    assert (there["state"].cpu()[slot] - states[slot]).norm() < 1e-5 * states[slot].norm()


def test_pieces_leave_enough_programs_and_little_to_keep() -> None:
    pytest.importorskip("triton")
    from headrace.kernels._triton_ssd import PROGRAMS, piece_tokens

    for num_tokens in (1, 63, 512, 2048, 8192, 65536, 1 << 20):
        for num_tiles in (1, 12, 96, 384):
            piece = piece_tokens(num_tokens, num_tiles, chunk=32, widest=20_000)
            assert piece % 32 == 0
            assert piece * 20_000 < 1 << 31
            num_pieces, most = -(-num_tokens // piece), max(PROGRAMS, num_tiles)
            assert num_pieces * num_tiles <= most or (piece + 32) * 20_000 >= 1 << 31
            assert piece == 32 or -(-num_tokens // (piece - 32)) * num_tiles > PROGRAMS - num_tiles
