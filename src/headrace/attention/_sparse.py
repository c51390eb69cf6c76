"""Kind `sparse`: attention over heads whose queries see some blocks of tokens, chosen for each KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.attention.port import AttentionSpec, LayerCache
from headrace.kernels.block_choice import BlockIndexSpec
from headrace.kernels.rope_write import Projected
from headrace.seam import Region


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """What one layer's sparse attention is, fixed at load."""

    kind: ClassVar[str] = "sparse"
    heads: AttentionSpec
    index: BlockIndexSpec
    window: int | None = None
    sink_tokens: int = 0

    def regions(self, dtype: str) -> tuple[Region, ...]:
        """K and V of this rank's heads, and one index key, which every rank keeps."""
        return (*self.heads.regions(dtype), Region("index_keys", (self.index.dim,), dtype))


@dataclass(frozen=True, slots=True)
class SparseCache:
    """One layer's paged K, V and index keys."""

    heads: LayerCache
    index_keys: Tensor  # [blocks, block_size, index dim]


@dataclass(frozen=True, slots=True)
class SparseProjected:
    """One layer's projections."""

    heads: Projected
    index_q: Tensor  # [tokens, kv_heads, index dim], normed and turned
    index_k: Tensor  # [tokens, index dim], normed and turned
