"""Kind `latent`: what layers with multi-head latent attention hand over, and what is kept of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.attention._compressed import PoolProjected
from headrace.seam import Region


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The indexer that chooses which tokens a layer's queries see (DeepSeek Sparse Attention)."""

    num_heads: int
    dim: int
    top: int
    """Tokens that a query sees at most."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """What one layer's latent attention is, fixed at load."""

    kind: ClassVar[str] = "latent"
    num_heads: int
    """On this rank."""
    rank: int
    """Features of the latent."""
    rope_dim: int
    nope_dim: int
    """Features of a query head that rope doesn't turn."""
    v_dim: int
    scale: float
    window: int | None = None
    sink_tokens: int = 0
    index: IndexSpec | None = None
    """None: queries see everything, or what a layer before chose."""

    def regions(self, dtype: str) -> tuple[Region, ...]:
        """One vector of latent and turned key, for all heads, and an indexer's key. Every rank keeps all of it."""
        latent = Region("latent", (self.rank + self.rope_dim,), dtype)
        return (latent,) if self.index is None else (latent, Region("index_keys", (self.index.dim,), dtype))


@dataclass(frozen=True, slots=True)
class LatentCache:
    """One layer's paged latents."""

    latent: Tensor  # [blocks, block_size, rank + rope_dim]
    index_keys: Tensor | None = None  # [blocks, block_size, index dim]


@dataclass(frozen=True, slots=True)
class IndexProjected:
    """What an indexer makes of the tokens, turned by its rope."""

    q: Tensor  # [tokens, index heads, dim]
    k: Tensor  # [tokens, dim]
    weights: Tensor  # [tokens, index heads] float32


@dataclass(slots=True)
class Choice:
    """What an indexer chose in this step, for its layer and those after it that have none."""

    positions: Tensor | None = None
    """[tokens, top] int64 in no order; -1 for none, behind all others: kernels read as many as a query could see."""


@dataclass(frozen=True, slots=True)
class LatentProjected:
    """One layer's projections, and what is still owed to them before and after attending.

    A head's key is k_up @ latent beside the turned key, its value v_up @ latent.
    """

    q: Tensor  # [tokens, heads, nope_dim + rope_dim], not turned; may be overwritten
    latent: Tensor  # [tokens, rank], normed
    k_rope: Tensor  # [tokens, rope_dim], not turned
    cos: Tensor  # [tokens, rope_dim / 2] float32
    sin: Tensor
    k_up: Tensor  # [heads, nope_dim, rank]
    v_up: Tensor  # [heads, v_dim, rank]
    interleaved: bool
    index: IndexProjected | PoolProjected | None = None
    """Pools are chosen by the kind around this one."""
    choice: Choice | None = None
    """None: queries see everything."""
