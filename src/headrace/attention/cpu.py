"""The CPU backend: compiled kernels over the paged cache, no copy of the context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from headrace.attention._layout import BlockLayout
from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.kernels.paged_attention import paged_attention
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise
from headrace.kernels.rope_write import Projected, rope_write

__all__ = ["CpuAttention"]


class CpuAttention(BlockLayout):
    """A query's result has the same bits in any batch, chunk and block table."""

    kind: ClassVar[str] = "heads"

    def bind(self, regions: Mapping[str, Tensor]) -> LayerCache:
        """K and V, [blocks, heads, block_size, dim] each."""
        return LayerCache(**regions)

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Write k, v, attend causally. -> [tokens, heads * dim]"""
        q = rope_write(packed, cache.k, cache.v, step.write_slots, k_scale=spec.k_scale, v_scale=spec.v_scale)
        return quantise(paged_attention(q, cache.k, cache.v, step, spec).flatten(1), form)
