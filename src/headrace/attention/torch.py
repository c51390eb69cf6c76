"""The oracle backend: plain torch on any device."""

from __future__ import annotations

from torch import Tensor

from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.kernels.kv_write import kv_write_twin
from headrace.kernels.paged_attention import paged_attention_twin

__all__ = ["TorchAttention"]


class TorchAttention:
    """Slow and obvious: a row at a time over a gathered context."""

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of K (and of V) of one layer."""
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def copy_blocks(self, cache: LayerCache, source: Tensor, destination: Tensor) -> None:
        """Copy whole blocks; ids are int64 [n], destinations distinct."""
        cache.k[destination] = cache.k[source]
        cache.v[destination] = cache.v[source]

    def plan(self, step: AttentionStep) -> None:
        """Nothing to share between layers."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec
    ) -> Tensor:
        """Write k, v, attend causally. -> [tokens, heads, dim] in q's dtype."""
        kv_write_twin(k, v, cache.k, cache.v, step.write_slots, step.block_size)
        return paged_attention_twin(q, cache.k, cache.v, step, spec)
