"""Kernels of recurrent layers: chunks and steps against a token at a time, and Triton against the torch twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.delta_rule import CHUNK, delta_rule, delta_rule_twin
from headrace.kernels.short_conv import short_conv, short_conv_twin
from headrace.kernels.ssd import ssd, ssd_twin
from headrace.layers.port import StateStep
from tests.kits.interpreter import DEVICES

SLOTS = 7
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
    "longer than a chunk": ([35, 1], 1),
}
"""Few tokens: the interpreter takes milliseconds for each."""


def step_of(lengths: Sequence[int], num_context: int, device: str = "cpu") -> StateStep:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return StateStep(
        slots=torch.tensor([5, 2, 0, 6, 3][: len(lengths)], device=device),
        query_starts=starts.to(device),
        positions=torch.arange(sum(lengths), device=device),
        max_query=max(lengths),
        num_context_rows=num_context,
        context_starts=tuple(starts[: num_context + 1].tolist()),
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_states(tensor: Tensor) -> Tensor:
    """The same in rows that are longer, as the states of several layers lie."""
    wide = torch.zeros(len(tensor), tensor[0].numel() + 24, dtype=tensor.dtype)
    view = wide[:, 8 : 8 + tensor[0].numel()].view(tensor.shape)
    return view.copy_(tensor)


def walk(
    lengths: Sequence[int], slots: Tensor, state: Tensor, one: Callable[[int, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Token by token: `one(token, state) -> (output, state)`."""
    outs, token = [], 0
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        for _ in range(length):
            out, state[slot] = one(token, state[slot])
            outs.append(out)
            token += 1
    return torch.stack(outs)


# ---- short convolution -----------------------------------------------------------------------


def conv_case(num_tokens: int, *, channels: int = 11, kernel: int = 4) -> tuple[Tensor, ...]:
    x = normal(num_tokens, channels + 5, seed=1)[:, 2 : 2 + channels]
    return x, normal(channels, kernel, seed=2), normal(channels, seed=3), normal(SLOTS, channels, kernel - 1, seed=4)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_conv_equals_a_token_at_a_time(rows: str, has_bias: bool) -> None:
    lengths, num_context = ROWS[rows]
    x, weight, bias, state = conv_case(sum(lengths))
    step = step_of(lengths, num_context)

    def one(token: int, held: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat((held, x[token, :, None]), 1)
        return F.silu((seen * weight).sum(1) + (bias if has_bias else 0.0)), seen[:, 1:]

    expected_state = state.clone()
    expected = walk(lengths, step.slots, expected_state, one)
    got = short_conv(x, weight, bias if has_bias else None, state, step)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("channels", "kernel", "dtype"), [(11, 4, torch.float32), (130, 2, torch.bfloat16)])
@pytest.mark.parametrize("rows", TRITON_ROWS)
def test_conv_in_triton(device: str, rows: str, channels: int, kernel: int, dtype: torch.dtype) -> None:
    from headrace.kernels._triton_recurrent import launch_short_conv

    lengths, num_context = TRITON_ROWS[rows]
    x, weight, bias, state = (part.to(dtype) for part in conv_case(sum(lengths), channels=channels, kernel=kernel))
    twin = state.clone()
    expected = short_conv_twin(x, weight, bias, twin, step_of(lengths, num_context))
    state = in_states(state).to(device)
    step = step_of(lengths, num_context, device)
    got = launch_short_conv(x.to(device), weight.to(device), bias.to(device), state, step)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state.cpu(), twin)


# ---- delta rule ------------------------------------------------------------------------------


def delta_case(num_tokens: int, *, by_feature: bool, strong: bool = False) -> dict[str, Tensor]:
    k_heads, heads, k_dim, v_dim = 2, 4, 6, 10
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


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_delta_rule_equals_a_token_at_a_time(rows: str, by_feature: bool, strong: bool) -> None:
    lengths, num_context = ROWS[rows]
    case = delta_case(sum(lengths), by_feature=by_feature, strong=strong)
    step = step_of(lengths, num_context)
    q, k = (F.normalize(case[part], dim=-1).repeat_interleave(2, 1) for part in ("q", "k"))

    def one(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * case["decay"][token].exp()[..., None]
        held = torch.einsum("hkv,hk->hv", state, k[token])
        delta = (case["v"][token] - held) * case["beta"][token][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], delta)
        return torch.einsum("hkv,hk->hv", state, q[token] * q.shape[-1] ** -0.5), state

    expected_state = case["state"].clone()
    expected = walk(lengths, step.slots, expected_state, one)
    got = delta_rule(**case, step=step)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(case["state"], expected_state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("by_feature", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)]
)
@pytest.mark.parametrize("rows", TRITON_ROWS)
def test_delta_rule_in_triton(device: str, rows: str, by_feature: bool, dtype: torch.dtype) -> None:
    from headrace.kernels._triton_recurrent import launch_delta_rule

    lengths, num_context = TRITON_ROWS[rows]
    case = delta_case(sum(lengths), by_feature=by_feature)
    case["state"] = in_states(case["state"].to(dtype))
    twin = {part: tensor.clone() for part, tensor in case.items()}
    expected = delta_rule_twin(**twin, step=step_of(lengths, num_context))
    there = {part: tensor.to(device) for part, tensor in case.items()}
    got = launch_delta_rule(**there, step=step_of(lengths, num_context, device))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-5, rtol=1e-4)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(there["state"].cpu(), twin["state"], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_that_are_all_the_same(device: str) -> None:
    """The system that a chunk solves is as ill-conditioned as it gets."""
    from headrace.kernels._triton_recurrent import launch_delta_rule

    case = delta_case(40, by_feature=False)
    case["k"] = case["k"][:1].expand(40, -1, -1).contiguous()
    case["beta"], case["decay"] = torch.ones_like(case["beta"]), torch.zeros_like(case["decay"])
    twin = {part: tensor.clone() for part, tensor in case.items()}
    expected = delta_rule_twin(**twin, step=step_of([40], 1))
    there = {part: tensor.to(device) for part, tensor in case.items()}
    got = launch_delta_rule(**there, step=step_of([40], 1, device))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-3, rtol=2e-3)


# ---- Mamba-2 ---------------------------------------------------------------------------------


def ssd_case(num_tokens: int) -> dict[str, Tensor]:
    heads, dim, groups, size = 4, 10, 2, 6
    b, c = normal(num_tokens, 2 * groups * size, seed=10).chunk(2, 1)
    return {
        "x": normal(num_tokens, heads, dim, seed=9),
        "b": b.unflatten(1, (groups, size)),
        "c": c.unflatten(1, (groups, size)),
        "decay": -normal(num_tokens, heads, seed=11).abs() * 0.3,
        "state": normal(SLOTS, heads, dim, size, seed=12),
    }


@pytest.mark.parametrize("rows", ROWS)
def test_ssd_equals_a_token_at_a_time(rows: str) -> None:
    lengths, num_context = ROWS[rows]
    case, step = ssd_case(sum(lengths)), step_of(lengths, num_context)
    b, c = (case[part].repeat_interleave(2, 1) for part in ("b", "c"))

    def one(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * case["decay"][token].exp()[:, None, None]
        state = state + torch.einsum("hd,hs->hds", case["x"][token], b[token])
        return torch.einsum("hds,hs->hd", state, c[token]), state

    expected_state = case["state"].clone()
    expected = walk(lengths, step.slots, expected_state, one)
    torch.testing.assert_close(ssd(**case, step=step), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(case["state"], expected_state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", TRITON_ROWS)
def test_ssd_in_triton(device: str, rows: str, dtype: torch.dtype) -> None:
    from headrace.kernels._triton_recurrent import launch_ssd

    lengths, num_context = TRITON_ROWS[rows]
    case = ssd_case(sum(lengths))
    case["state"] = in_states(case["state"].to(dtype))
    twin = {part: tensor.clone() for part, tensor in case.items()}
    expected = ssd_twin(**twin, step=step_of(lengths, num_context))
    there = {part: tensor.to(device) for part, tensor in case.items()}
    got = launch_ssd(**there, step=step_of(lengths, num_context, device))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-5, rtol=1e-4)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(there["state"].cpu(), twin["state"], atol=tolerance, rtol=tolerance)
