"""Kind `pooled`: latent attention over the pools of tokens that an indexer chose by their compressed keys, and over the
last tokens, which make no pool yet (GLM-5.3-Flash, Zhipu AI 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.attention._compressed import EntryIndexSpec, exact, loose_regions
from headrace.attention._latent import LatentCache, LatentSpec
from headrace.attention.port import CachePart
from headrace.seam import Region


@dataclass(frozen=True, slots=True)
class PooledSpec:
    """What one layer's attention is, fixed at load."""

    kind: ClassVar[str] = "pooled"
    latent: LatentSpec
    index: EntryIndexSpec
    window: int | None = None
    sink_tokens: int = 0

    def regions(self, dtype: str) -> tuple[Region, ...]:
        """The latents. Every rank keeps all of it."""
        return self.latent.regions(dtype)

    def parts(self, dtype: str) -> tuple[CachePart, ...]:
        """Latents; what the next pool's key is made of; the pools' keys."""
        pool = self.index.pool
        loose = tuple(loose_regions("index_", pool, exact(dtype)))
        keys = (Region("index_entries", (pool.dim,), dtype),)
        return (
            CachePart(self.regions(dtype)),
            CachePart(loose, pool.reach),
            CachePart(keys, None, pool.every),
        )


@dataclass(frozen=True, slots=True)
class PooledCache:
    """One layer's paged vectors: [blocks, entries of a block, features] each."""

    latent: LatentCache
    index_values: Tensor
    index_gates: Tensor
    index_entries: Tensor
