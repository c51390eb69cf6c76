"""Attention over residuals (Kimi Team 2026, Attention Residuals): a token's next input is a mix of what it was at some
depths of the model, weighed by the softmax of one learned score each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["depth_mix"]


def depth_mix(
    depths: Tensor, weight: Tensor, eps: float, *, count: int, added: Tensor | None = None, replaces: bool = False
) -> Tensor:
    """Bring place 0 up to date, and mix the first `count` places; computed in float32.

    The score of a place is the product of `weight` with its RMS norm; what is mixed is not normed.

    Args:
        depths: [tokens, places, hidden]. Place 0, the sum that is still growing, is written.
        weight: [hidden] float32, the norm's weight times that of the projection to a score.
        added: [tokens, hidden] in depths' dtype, what place 0 is owed.
        replaces: place 0 becomes `added` itself.

    Returns:
        [tokens, hidden] in depths' dtype. A token's result depends on that token only.
    """
    assert 0 < count <= depths.shape[1], (count, depths.shape)
    assert added is not None or not replaces
    if depths.is_cuda:
        from headrace.kernels._triton_depth_mix import launch_depth_mix

        return launch_depth_mix(depths, weight, eps, count=count, added=added, replaces=replaces)
    return depth_mix_twin(depths, weight, eps, count=count, added=added, replaces=replaces)


def depth_mix_twin(
    depths: Tensor, weight: Tensor, eps: float, *, count: int, added: Tensor | None = None, replaces: bool = False
) -> Tensor:
    """The plain torch form of `depth_mix`: place by place, so that no wide copy of all of them is held."""
    if added is not None:
        depths[:, 0] = added if replaces else depths[:, 0] + added
    places = depths[:, :count].unbind(1)
    shares = torch.softmax(torch.stack([_score(place.float(), weight, eps) for place in places], -1), -1)
    out = torch.zeros(depths.shape[0], depths.shape[2], dtype=torch.float32, device=depths.device)
    for share, place in zip(shares.unbind(1), places):
        out += share.unsqueeze(1) * place.float()
    return out.to(depths.dtype)


def _score(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[tokens, hidden] -> [tokens]"""
    return (wide * weight).sum(-1) * torch.rsqrt(wide.square().mean(-1) + eps)
