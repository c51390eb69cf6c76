"""Mamba-2's state space (Dao and Gu 2024) over packed rows that go on from states.

A head's state S [dim, state] decays and takes the token: S <- exp(decay) * S + time * x b^T with the token's step size
`time`; the output is S c + skip * x. The decay is one number a head, b and c are those of the head's group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.port import StateRows

__all__ = ["ssd"]

CHUNK = 64
"""Tokens that are computed together: pairs of them take memory."""


def ssd(
    x: Tensor, b: Tensor, c: Tensor, *, time: Tensor, decay: Tensor, skip: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """Scan the rows' tokens; a row of one token is a single update.

    Args:
        x: [tokens, heads, dim].
        b, c: [tokens, groups, state] in the type of x; each serves heads / groups heads in a row.
        time: [tokens, heads] float32, step sizes, not below 0.
        decay: [tokens, heads] float32, logarithms, at most 0.
        skip: [heads] float32.
        state: [slots, heads, dim, state]; the rows' slots are overwritten.

    Returns:
        [tokens, heads, dim] float32.
    """
    if not x.is_cuda:
        return ssd_twin(x, b, c, time=time, decay=decay, skip=skip, state=state, step=step)
    from headrace.kernels._triton_ssd import launch_ssd

    return launch_ssd(x, b, c, time=time, decay=decay, skip=skip, state=state, step=step)


def ssd_twin(
    x: Tensor, b: Tensor, c: Tensor, *, time: Tensor, decay: Tensor, skip: Tensor, state: Tensor, step: StateRows
) -> Tensor:
    """The plain torch form of `ssd`."""
    skipped = skip[:, None] * x
    x = x.float() * time[..., None]
    each = x.shape[1] // b.shape[1]
    b, c = b.float().repeat_interleave(each, 1), c.float().repeat_interleave(each, 1)
    out = torch.empty_like(x)  # [tokens, heads, dim] float32
    starts = step.context_starts
    for row in range(step.num_context_rows):
        slot = step.slots[row]
        live = state[slot].float()
        for begin in range(starts[row], starts[row + 1], CHUNK):
            part = slice(begin, min(begin + CHUNK, starts[row + 1]))
            out[part], live = _chunk(x[part], b[part], c[part], decay[part], live)
        state[slot] = live.to(state.dtype)
    if starts[-1] < len(x):
        slots, rest = step.slots[step.num_context_rows :], slice(starts[-1], len(x))
        live = state[slots].float() * decay[rest].exp()[..., None, None]
        live += x[rest][..., None] * b[rest][..., None, :]
        out[rest] = torch.einsum("rhds,rhs->rhd", live, c[rest])
        state[slots] = live.to(state.dtype)
    return out + skipped


def _chunk(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens of one row at once. state: [heads, dim, state] -> (out [tokens, heads, dim], the new state)"""
    x, b, c = (part.transpose(0, 1) for part in (x, b, c))  # [heads, tokens, ...]
    total = decay.cumsum(0).T[..., None]  # [heads, tokens, 1]
    count = x.shape[1]
    ahead = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    between = (total - total.transpose(1, 2)).masked_fill(ahead, float("-inf")).exp()  # i from j
    out = (c @ b.transpose(1, 2) * between) @ x + (c * total.exp()) @ state.transpose(1, 2)
    last = total[:, -1:]
    state = state * last.exp() + (x * (last - total).exp()).transpose(1, 2) @ b
    return out.transpose(0, 1), state
