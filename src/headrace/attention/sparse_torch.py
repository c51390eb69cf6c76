"""The oracle backend of sparse attention: plain torch on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from headrace.attention._layout import BlockLayout
from headrace.attention._sparse import SparseCache, SparseProjected, SparseSpec
from headrace.attention.port import AttentionStep, LayerCache
from headrace.kernels.block_choice import block_choice
from headrace.kernels.latent_attention import latent_write
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise_twin
from headrace.kernels.rope_write import rope_write_twin
from headrace.kernels.sparse_attention import sparse_attention

__all__ = ["SparseTorch"]


class SparseTorch(BlockLayout):
    """Slow and obvious: a row at a time over all of its context. It asks the device for lengths."""

    kind: ClassVar[str] = "sparse"

    def bind(self, regions: Mapping[str, Tensor]) -> SparseCache:
        """K and V, [blocks, heads, block_size, dim] each, and index keys, [blocks, block_size, dim]."""
        return SparseCache(LayerCache(regions["k"], regions["v"]), regions["index_keys"])

    def run(
        self,
        packed: SparseProjected,
        *,
        cache: SparseCache,
        step: AttentionStep,
        spec: SparseSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        """Write k, v and index keys, choose, attend causally. -> [tokens, heads * dim]"""
        heads = spec.heads
        k, v = cache.heads.k, cache.heads.v
        q = rope_write_twin(packed.heads, k, v, step.write_slots, k_scale=heads.k_scale, v_scale=heads.v_scale)
        latent_write(packed.index_k, cache.index_keys, step.write_slots)
        chosen = block_choice(packed.index_q, cache.index_keys, step, spec.index)
        out = sparse_attention(q, k, v, step, heads, chosen=chosen, block=spec.index.block)
        return quantise_twin(out.flatten(1), form)
