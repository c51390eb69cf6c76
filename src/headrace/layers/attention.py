"""The attention module: fused projections, optional norms of queries and keys, rope, output projection."""

from __future__ import annotations

from torch import Tensor

from headrace.attention.port import AttentionSpec
from headrace.kernels.rope import apply_rope
from headrace.layers.linear import Linear
from headrace.layers.norm import HeadNorm
from headrace.layers.port import Act, ForwardStep

Heads = tuple[Tensor, Tensor, Tensor]
"""q [tokens, heads, dim], k and v [tokens, kv_heads, dim], of this rank."""


class Attention:
    """Everything of an attention block but attending itself, which the runner hands to the layer."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        *,
        spec: AttentionSpec,
        rope: str,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> None:
        """
        Args:
            rope: which of the model's rope kinds turns q and k.
        """
        self.qkv = qkv
        self.out = out
        self.spec = spec
        self.rope = rope
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._widths = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
        )

    def project(self, act: Act, step: ForwardStep) -> Heads:
        """[tokens, hidden] -> q, k, v with rope applied"""
        q, k, v = self.qkv(act).split(self._widths, dim=-1)
        q = q.unflatten(-1, (-1, self.spec.head_dim))
        k = k.unflatten(-1, (-1, self.spec.head_dim))
        v = v.unflatten(-1, (-1, self.spec.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        rope = step.ropes[self.rope]
        q, k = apply_rope(q, k, rope.cos, rope.sin)
        return q, k, v

    def output(self, mixed: Tensor) -> Tensor:
        """[tokens, heads * dim] -> [tokens, hidden], partial"""
        return self.out(Act(mixed))
