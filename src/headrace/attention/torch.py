"""The oracle backend: plain torch on any device."""

from __future__ import annotations

from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.kernels.paged_attention import paged_attention_twin
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise_twin
from headrace.kernels.rope_write import Projected, rope_write_twin

__all__ = ["TorchAttention"]


class TorchAttention:
    """Slow and obvious: a row at a time over a gathered context."""

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of K (and of V) of one layer."""
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def plan(self, step: AttentionStep) -> None:
        """Nothing to share between layers."""

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Write k, v, attend causally. -> [tokens, heads * dim]"""
        q = rope_write_twin(packed, cache.k, cache.v, step.write_slots, k_scale=spec.k_scale, v_scale=spec.v_scale)
        return quantise_twin(paged_attention_twin(q, cache.k, cache.v, step, spec).flatten(1), form)
