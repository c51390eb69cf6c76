"""What some architectures do to queries and keys that the attention kernels don't: parts of an attention block.

Each is a step between the packed projection and attending, in plain torch; the kernels then do what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope import apply_rope
from headrace.kernels.rope_write import Projected
from headrace.layers.norm import HeadNorm, Scale
from headrace.layers.parallel import ParallelContext, share_heads
from headrace.layers.port import ForwardStep, Rope
from headrace.layers.weights import Parameter, Slot


class HeadStep(Protocol):
    """May overwrite the projection."""

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected: ...


def no_rope(step: ForwardStep) -> Rope:
    """Nothing is turned: pairs of no features."""
    nothing = torch.empty(step.positions.shape[0], 0, dtype=torch.float32, device=step.positions.device)
    return Rope(nothing, nothing)


class WholeNorm:
    """An RMS norm over the features of all heads of a projection, of which a rank holds its share (OLMo 2)."""

    def __init__(self, scale: Scale, *, features: int, num_copies: int, parallel: ParallelContext) -> None:
        """
        Args:
            scale: this rank's share of the weight.
            features: of all ranks together.
            num_copies: ranks that hold the same heads as this one.
        """
        self.scale = scale
        self.features = features
        self.num_copies = num_copies
        self.parallel = parallel

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, features of this rank] -> the same"""
        if self.parallel.size == 1:
            return self.scale(x.contiguous())
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True) / self.num_copies
        mean = self.parallel.collectives.all_reduce(squares) / self.features
        ready = self.scale.ready()
        return (wide * torch.rsqrt(mean + ready.eps)).to(x.dtype) * ready.weight


class WholeNorms:
    """`WholeNorm` of queries and of keys."""

    def __init__(self, q_norm: WholeNorm, k_norm: WholeNorm) -> None:
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        q, k, _ = (part.flatten(1) for part in packed.heads())
        widths = (q.shape[1], k.shape[1])
        normed = (self.q_norm(q), self.k_norm(k))
        packed.qkv[:, : widths[0]] = normed[0]
        packed.qkv[:, widths[0] : sum(widths)] = normed[1]
        return packed


class UnitNorm:
    """An RMS norm without a weight over each head's features (Llama 4)."""

    def __init__(self, head_dim: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.eps = eps
        self.ones = torch.ones(head_dim, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads, dim] -> the same"""
        normed = rms_norm(x.reshape(-1, x.shape[-1]), self.ones, self.eps)
        assert isinstance(normed, Tensor)
        return normed.view(x.shape)


class TurnedNorms:
    """Norms over each head's features after rope, not before it (Hunyuan, Llama 4)."""

    def __init__(self, q_norm: HeadNorm | UnitNorm, k_norm: HeadNorm | UnitNorm) -> None:
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        q, k, _ = packed.heads()
        turned_q, turned_k = apply_rope(q, k, packed.cos, packed.sin, interleaved=packed.interleaved)
        q.copy_(self.q_norm(turned_q))
        k.copy_(self.k_norm(turned_k))
        nothing = no_rope(step)
        return replace(packed, cos=nothing.cos, sin=nothing.sin)


class KeysAsValues:
    """The projection has no values: they are the keys, before these are normed and turned (Gemma 4)."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        keys = packed.qkv[:, packed.num_heads * self.head_dim :]
        return replace(packed, qkv=torch.cat((packed.qkv, keys), 1))


class HandedOn:
    """Keys and values stay for later layers, not normed and turned yet (Gemma 4's small ones). The last step."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        width = packed.num_heads * packed.head_dim
        step.carried[f"keys of {self.layer}"] = packed.qkv[:, width:].clone()  # whoever takes `packed` may overwrite it
        return packed


class TakenOver:
    """The projection has queries alone: keys and values are what `HandedOn` left. The first step."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        return replace(packed, qkv=torch.cat((packed.qkv, step.carried[f"keys of {self.layer}"]), 1))


class ValueNorm:
    """An RMS norm without a weight over each value head (Gemma 4)."""

    def __init__(self, norm: UnitNorm) -> None:
        self.norm = norm

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        _, _, v = packed.heads()
        v.copy_(self.norm(v))
        return packed


class Temperature:
    """Queries grow with their position: 1 + beta * ln(1 + floor((position + offset) / length)).

    Llama 4 counts positions from one, Ministral 3 from zero.

    A factor commutes with rope, not with a norm of queries that comes after it.
    """

    def __init__(self, beta: float, length: int, *, offset: int = 0) -> None:
        self.beta = beta
        self.length = length
        self.offset = offset

    def __call__(self, packed: Projected, step: ForwardStep) -> Projected:
        assert packed.q_norm is None, "the kernel's norm would undo it"
        factor = 1 + self.beta * torch.log1p(torch.floor((step.positions + self.offset) / self.length))
        q, _, _ = packed.heads()
        q.mul_(factor.to(q.dtype)[:, None, None])
        return packed


class Sinks:
    """A logit per head that takes part in the softmax's sum only (gpt-oss): parameter `{name}.weight`."""

    def __init__(self, name: str, *, slot: Slot, dtype: torch.dtype, device: torch.device) -> None:
        self._parameter = Parameter(f"{name}.weight", [slot], dtype=dtype, device=device)
        self.logits: Tensor | None = None
        """[heads of this rank], once it is loaded."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._parameter,)

    def finish(self) -> None:
        self.logits = self._parameter.take()


def num_copies(num_heads: int, num_kv_heads: int, parallel: ParallelContext) -> int:
    """Ranks that hold the same KV heads as this one."""
    own = parallel.heads(num_heads, num_kv_heads).kv
    ranks = range(parallel.size)
    return sum(share_heads(num_heads, num_kv_heads, rank=rank, size=parallel.size).kv == own for rank in ranks)
