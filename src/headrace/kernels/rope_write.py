"""What stands between the packed projection and attending: head norms, rope, and the write to the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.kv_write import kv_write, kv_write_twin
from headrace.kernels.quantise import FP8, to_fp8
from headrace.kernels.rms_norm import rms_norm, rms_norm_twin
from headrace.kernels.rope import apply_rope, apply_rope_twin

__all__ = ["rope_write"]


@dataclass(frozen=True, slots=True)
class HeadScale:
    """An RMS norm over each head's features."""

    weight: Tensor  # [dim]
    eps: float
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class Projected:
    """The packed projection of one layer, and what is still owed to its heads before they attend.

    Whoever takes it may overwrite `qkv`.
    """

    qkv: Tensor  # [tokens, (heads + 2 * kv_heads) * dim]: q, k, v
    num_heads: int
    num_kv_heads: int
    cos: Tensor  # [tokens, rotary_dim / 2] float32
    sin: Tensor
    interleaved: bool = False
    q_norm: HeadScale | None = None
    k_norm: HeadScale | None = None

    @property
    def head_dim(self) -> int:
        return self.qkv.shape[1] // (self.num_heads + 2 * self.num_kv_heads)

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k and v: [tokens, heads, dim], [tokens, kv_heads, dim] twice."""
        heads = self.qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return q, k, v


def rope_write(
    packed: Projected,
    k_cache: Tensor,
    v_cache: Tensor,
    write_slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Norm and turn q and k, write k and v to the cache. The projection must not be used any more.

    Args:
        k_cache, v_cache: [num_blocks, kv_heads, block_size, dim].
        write_slots: [tokens] int64, block * block_size + offset; several tokens may share a slot of the dummy block 0.
        k_scale, v_scale: an FP8 cache holds the values divided by these, saturated.

    Returns:
        q [tokens, heads, dim], a view of the projection or a tensor of its own.
    """
    if packed.qkv.is_cuda:
        from headrace.kernels._triton_rope import launch_rope_write

        return launch_rope_write(packed, k_cache, v_cache, write_slots, k_scale=k_scale, v_scale=v_scale)
    q, k, v = packed.heads()
    q, k = _normed(q, packed.q_norm), _normed(k, packed.k_norm)
    q, k = apply_rope(q, k, packed.cos, packed.sin, interleaved=packed.interleaved)
    if k_cache.dtype == FP8:
        k, v = to_fp8(k.float() / k_scale), to_fp8(v.float() / v_scale)
    kv_write(k, v, k_cache, v_cache, write_slots, k_cache.shape[2])
    return q


def rope_write_twin(
    packed: Projected,
    k_cache: Tensor,
    v_cache: Tensor,
    write_slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """The plain torch form of `rope_write`; leaves the projection alone."""
    q, k, v = packed.heads()
    if packed.q_norm is not None:
        q = _norm_twin(q, packed.q_norm)
    if packed.k_norm is not None:
        k = _norm_twin(k, packed.k_norm)
    q, k = apply_rope_twin(q, k, packed.cos, packed.sin, interleaved=packed.interleaved)
    if k_cache.dtype == FP8:
        k, v = to_fp8(k.float() / k_scale), to_fp8(v.float() / v_scale)
    kv_write_twin(k, v, k_cache, v_cache, write_slots, k_cache.shape[2])
    return q


def _normed(x: Tensor, scale: HeadScale | None) -> Tensor:
    if scale is None:
        return x
    normed = rms_norm(x.reshape(-1, x.shape[-1]), scale.weight, scale.eps, plus_one=scale.plus_one)
    assert isinstance(normed, Tensor)
    return normed.view(x.shape)


def _norm_twin(x: Tensor, scale: HeadScale) -> Tensor:
    normed = rms_norm_twin(x, scale.weight, scale.eps, plus_one=scale.plus_one)
    assert isinstance(normed, torch.Tensor)
    return normed
