"""The CPU backend: compiled kernels over the paged cache, no copy of the context."""

from __future__ import annotations

from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise
from headrace.kernels.rope_write import Projected, rope_write

__all__ = ["CpuAttention"]


class CpuAttention:
    """A query's result has the same bits in any batch, chunk and block table."""

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of K (and of V) of one layer."""
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, step: AttentionStep) -> None:
        """The kernel reads the step as it is."""

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Write k, v, attend causally. -> [tokens, heads * dim]"""
        q = rope_write(packed, cache.k, cache.v, step.write_slots, k_scale=spec.k_scale, v_scale=spec.v_scale)
        return quantise(paged_attention(q, cache.k, cache.v, step, spec).flatten(1), form)
