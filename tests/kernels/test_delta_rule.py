"""The delta rule: chunks and steps against a token at a time, and Triton against the torch twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.delta_rule import CHUNK, delta_rule, delta_rule_twin
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
    "prompts and decode": ([18, 1, 2, 1, 1], 3),
    "around half a chunk": ([1, 15, 16, 17], 4),
    "around two chunks": ([64, 65], 2),
}
"""Few tokens: the interpreter takes milliseconds for each."""


def delta_case(
    num_tokens: int, *, by_feature: bool, strong: bool = False, k_dim: int = 6, v_dim: int = 10
) -> dict[str, Tensor]:
    k_heads, heads = 1, 2
    packed = normal(num_tokens, 2 * k_heads * k_dim + heads * v_dim, seed=5)
    q, k, v = packed.split((k_heads * k_dim, k_heads * k_dim, heads * v_dim), 1)
    decay = -normal(num_tokens, heads, k_dim if by_feature else 1, seed=6).abs() * (60.0 if strong else 0.3)
    return {
        "q": q.unflatten(1, (k_heads, k_dim)),
        "k": k.unflatten(1, (k_heads, k_dim)),
        "v": v.unflatten(1, (heads, v_dim)),
        "decay": decay,
        "beta": normal(num_tokens, heads, seed=7).sigmoid(),
        "state": normal(SLOTS, heads, k_dim, v_dim, seed=8),
    }


def token_by_token(case: dict[str, Tensor], lengths: Sequence[int], slots: Tensor) -> tuple[Tensor, Tensor]:
    """-> (out, states), in float64"""
    parts = {name: tensor.cpu().double() for name, tensor in case.items()}
    group = parts["v"].shape[1] // parts["q"].shape[1]
    q, k = (F.normalize(parts[part], dim=-1).repeat_interleave(group, 1) for part in ("q", "k"))

    def one(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * parts["decay"][token].exp()[..., None]
        held = torch.einsum("hkv,hk->hv", state, k[token])
        delta = (parts["v"][token] - held) * parts["beta"][token][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], delta)
        return torch.einsum("hkv,hk->hv", state, q[token] * q.shape[-1] ** -0.5), state

    return walk(lengths, slots.cpu(), parts["state"], one), parts["state"]


def launch(case: dict[str, Tensor], lengths: Sequence[int], num_context: int, device: str) -> tuple[Tensor, Tensor]:
    """-> (out, states) of the Triton kernels"""
    from headrace.kernels._triton_delta import launch_delta_rule

    q, k, v, decay, beta = (case[part].to(device) for part in ("q", "k", "v", "decay", "beta"))
    state = in_states(case["state"]).to(device)
    step = step_of(lengths, num_context, device)
    return launch_delta_rule(q, k, v, decay=decay, beta=beta, state=state, step=step).cpu(), state.cpu()


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_delta_rule_equals_a_token_at_a_time(rows: str, by_feature: bool, strong: bool) -> None:
    lengths, num_context = ROWS[rows]
    case = delta_case(sum(lengths), by_feature=by_feature, strong=strong)
    step = step_of(lengths, num_context)
    expected, expected_state = token_by_token(case, lengths, step.slots)
    got = delta_rule(**case, step=step)
    torch.testing.assert_close(got, expected.float(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(case["state"], expected_state.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("rows", TRITON_ROWS)
def test_in_triton(device: str, rows: str, by_feature: bool, dtype: torch.dtype) -> None:
    lengths, num_context = TRITON_ROWS[rows]
    case = delta_case(sum(lengths), by_feature=by_feature, k_dim=24, v_dim=40)
    case |= {part: case[part].to(dtype) for part in ("q", "k", "v", "state")}
    twin = {part: tensor.clone() for part, tensor in case.items()}
    expected = delta_rule_twin(**twin, step=step_of(lengths, num_context))
    out, state = launch(case, lengths, num_context, device)
    tolerance = 4e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    tolerance = 4e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(state, twin["state"], atol=tolerance, rtol=tolerance)


def hard_case(by_feature: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[int]]:
    """Decays of 0 and so strong that nothing is left, betas of 0 and 1, and keys that are all the same."""
    lengths = [37, 29]
    case = delta_case(sum(lengths), by_feature=by_feature, k_dim=24, v_dim=40)
    case |= {part: case[part].to(dtype) for part in ("q", "k", "v")}
    draw = normal(*case["decay"].shape, seed=9)
    case["decay"] = torch.where(draw > 0.5, -50.0, torch.where(draw < -0.5, -0.0, case["decay"]))
    case["beta"] = normal(*case["beta"].shape, seed=10).clamp(-0.5, 0.5) + 0.5
    case["k"][37:], case["beta"][37:], case["decay"][37:] = case["k"][37], 1.0, 0.0
    return case, lengths


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_feature", [False, True])
def test_hard_numbers(device: str, by_feature: bool, dtype: torch.dtype) -> None:
    case, lengths = hard_case(by_feature, dtype)
    expected, expected_state = token_by_token(case, lengths, step_of(lengths, 2).slots)
    out, state = launch(case, lengths, 2, device)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out, expected.float(), atol=tolerance / 2, rtol=tolerance)
    torch.testing.assert_close(state, expected_state.float(), atol=tolerance, rtol=tolerance)


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_feature", [False, True])
def test_rounding_costs_less_than_that_of_the_inputs(device: str, by_feature: bool) -> None:
    """Factors of 16-bit models have 11 bits: an eighth of what rounding q, k and v to bfloat16 costs (2.4e-3)."""
    case = delta_case(96, by_feature=by_feature, k_dim=24, v_dim=40)
    case |= {part: case[part].to(torch.bfloat16) for part in ("q", "k", "v")}
    step = step_of([96], 1)
    expected, expected_state = token_by_token(case, [96], step.slots)
    out, state = launch(case, [96], 1, device)
    slots = step.slots.cpu()
    assert error(out, expected) < 1e-3 and error(state[slots], expected_state[slots]) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [2.0**100, 2.0**-60])
@pytest.mark.parametrize("by_feature", [False, True])
def test_values_that_float16_does_not_hold(device: str, by_feature: bool, scale: float) -> None:
    """All is linear in values and states, and a power of two more in them is one more in what comes out."""
    lengths = [37, 5]
    case = delta_case(sum(lengths), by_feature=by_feature, k_dim=24, v_dim=40)
    case |= {part: case[part].to(torch.bfloat16) for part in ("q", "k", "v")}
    out, state = launch(case, lengths, 2, device)
    slots = step_of(lengths, 2).slots.cpu()
    case |= {part: case[part] * scale for part in ("v", "state")}
    large_out, large_state = launch(case, lengths, 2, device)
    torch.testing.assert_close(large_out, out * scale, atol=0, rtol=0)
    torch.testing.assert_close(large_state[slots], state[slots] * scale, atol=0, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_feature", [False, True])
def test_lengths_of_keys_and_queries(device: str, by_feature: bool) -> None:
    """Keys and queries of any length, none among them; a state far larger than values; one value far larger."""
    lengths = [37, 5]
    case = delta_case(sum(lengths), by_feature=by_feature, k_dim=24, v_dim=40)
    powers = torch.tensor([0.1, 1.0, 1e4, 1e8])[torch.arange(42) % 4][:, None, None]
    case |= {part: (case[part] * powers).to(torch.bfloat16) for part in ("q", "k")}
    case["v"][3, 0, 7], case["state"] = 1e6, case["state"] * 1e5
    case["v"], case["beta"][3] = case["v"].to(torch.bfloat16), 1.0
    case["k"][5], case["q"][6], case["beta"][4] = 0.0, 0.0, 0.0
    expected, expected_state = token_by_token(case, lengths, step_of(lengths, 2).slots)
    slots = step_of(lengths, 2).slots.cpu()
    out, state = launch(case, lengths, 2, device)
    assert error(out, expected) < 1e-3 and error(state[slots], expected_state[slots]) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_feature", [False, True])
def test_segments_and_what_memory_held(device: str, by_feature: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace of one chunk or three yields the same numbers as one of all, and nothing is read before it is
    written; lengths on the host are not needed."""
    from headrace.kernels import _triton_delta as kernels

    lengths = [33, 1, 40, 1]
    case = delta_case(sum(lengths), by_feature=by_feature, k_dim=24, v_dim=40)
    case |= {part: case[part].to(torch.bfloat16) for part in ("q", "k", "v")}
    expected, expected_state = launch(case, lengths, 3, device)
    empty, plain = torch.empty, step_of
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))
    monkeypatch.setattr(f"{__name__}.step_of", lambda *args: replace(plain(*args), context_starts=(0,)))
    for bound in (1, 50_000):
        monkeypatch.setattr(kernels, "WORKSPACE_BYTES", bound)
        out, state = launch(case, lengths, 3, device)
        torch.testing.assert_close(out, expected, atol=0, rtol=0)
        torch.testing.assert_close(state, expected_state, atol=0, rtol=0)
