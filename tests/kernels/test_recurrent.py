"""Short convolutions: rows against a token at a time, and Triton against the torch twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.short_conv import short_conv, short_conv_twin
from tests.kits.interpreter import DEVICES
from tests.kits.recurrent import SLOTS, in_states, normal, step_of, walk

ROWS: dict[str, tuple[list[int], int]] = {
    "decode": ([1, 1, 1], 0),
    "one prompt": ([19], 1),
    "prompts and decode": ([18, 1, 33, 1, 1], 3),
    "longer than a tile": ([71, 1], 1),
}
"""By name, (tokens of each row, context rows)."""
TRITON_ROWS: dict[str, tuple[list[int], int]] = {
    "decode": ([1, 1, 1], 0),
    "prompts and decode": ([18, 1, 2, 1, 1], 3),
    "longer than a tile": ([35, 1], 1),
}
"""Few tokens: the interpreter takes milliseconds for each."""


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
