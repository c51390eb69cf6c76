"""Rotary position embedding (Su et al. 2021) of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._native import dtype_flag, library, num_threads

__all__ = ["apply_rope"]


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the first `2 * cos.shape[1]` features of each head; the rest passes through. May work in place.

    Args:
        q: [tokens, heads, dim].
        k: [tokens, kv_heads, dim].
        cos, sin: [tokens, rotary_dim / 2] float32.
        interleaved: pairs are neighbours (2i, 2i + 1); otherwise feature i pairs with i + rotary_dim / 2.

    Returns:
        q and k rotated, in their own dtypes; the caller must not use the arguments any more.
    """
    native = library() if q.is_cpu else None
    half = dtype_flag(q)
    if native is None or half is None or q.stride(-1) != 1 or k.stride(-1) != 1:
        return apply_rope_twin(q, k, cos, sin, interleaved=interleaved)
    assert k.dtype == q.dtype and cos.dtype == sin.dtype == torch.float32 and 2 * cos.shape[1] <= q.shape[2]
    cos, sin = cos.contiguous(), sin.contiguous()
    native.hr_rope(
        q.data_ptr(),
        k.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.stride(0),
        k.stride(0),
        q.stride(1),
        k.stride(1),
        cos.shape[1],
        half,
        interleaved,
        num_threads(),
    )
    return q, k


def apply_rope_twin(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The plain torch form of `apply_rope`; leaves its arguments alone."""
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = x[..., : 2 * half].float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., :half], wide[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def turn_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last `2 * cos.shape[1]` features of each head, neighbours as pairs (DeepSeek-V4).

    x: [tokens, heads, dim]; cos, sin: [tokens, rotary_dim / 2] float32 -> the same as x
    """
    still = x.shape[-1] - 2 * cos.shape[1]
    return torch.cat((x[..., :still], _rotate(x[..., still:], cos, sin, True)), -1)
