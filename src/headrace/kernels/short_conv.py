"""Short causal convolutions over packed rows, each channel by itself, that go on from a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.port import StateRows

__all__ = ["short_conv"]


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: StateRows) -> Tensor:
    """silu(convolution), and the rows' states after it.

    Args:
        x: [tokens, channels].
        weight: [channels, kernel].
        bias: [channels].
        state: [slots, channels, kernel - 1], the inputs before each row's first token; overwritten with the last ones.

    Returns:
        [tokens, channels] in x's dtype.
    """
    if not x.is_cuda:
        return short_conv_twin(x, weight, bias, state, step)
    from headrace.kernels._triton_recurrent import launch_short_conv

    return launch_short_conv(x, weight, bias, state, step)


def short_conv_twin(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: StateRows) -> Tensor:
    """The plain torch form of `short_conv`."""
    out = torch.empty_like(x)
    starts = step.context_starts
    for row in range(step.num_context_rows):
        part = slice(starts[row], starts[row + 1])
        out[part] = _rows(x[part].T[None], weight, bias, state, step.slots[row : row + 1])[0].T
    first = starts[-1]
    if first < len(x):
        out[first:] = _rows(x[first:, :, None], weight, bias, state, step.slots[step.num_context_rows :])[..., 0]
    return out


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor) -> Tensor:
    """[rows, channels, tokens] -> the same; every row has as many tokens"""
    seen = torch.cat((state[slots].to(x.dtype), x), -1)
    state[slots] = seen[..., x.shape[-1] :].to(state.dtype)
    wide = F.conv1d(seen.float(), weight.float()[:, None], None if bias is None else bias.float(), groups=x.shape[1])
    return F.silu(wide).to(x.dtype)
