"""Kernels of recurrent layers in tests: steps, inputs, states as pools hold them, and a walk token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.layers.port import StateStep

SLOTS = 7


def step_of(lengths: Sequence[int], num_context: int, device: str = "cpu") -> StateStep:
    """At most `SLOTS` rows."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return StateStep(
        slots=torch.tensor([5, 2, 0, 6, 3, 1, 4][: len(lengths)], device=device),
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
