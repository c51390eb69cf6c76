"""Kind `compressed`: queries see a window of tokens and, of all before them, vectors that stand for several tokens.

DeepSeek-V4 (DeepSeek-AI 2026): one key that is the value too, for all heads. A layer compresses lightly and lets an
indexer choose, or heavily and sees all, or sees its window alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.attention.port import CachePart
from headrace.kernels.pool_windows import PoolSpec as PoolSpec
from headrace.seam import Region

FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class EntryIndexSpec:
    """The indexer that chooses among compressed vectors, by compressed keys of its own."""

    num_heads: int
    pool: PoolSpec
    top: int
    """Entries that a query sees at most."""


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """What one layer's attention is, fixed at load."""

    kind: ClassVar[str] = "compressed"
    num_heads: int
    """On this rank."""
    dim: int
    scale: float
    window: int | None
    sinks: Tensor | None = None
    """[num_heads] a logit per head that takes part in the softmax's sum only; there once it is loaded."""
    sink_tokens: int = 0
    pool: PoolSpec | None = None
    """None: queries see their window alone."""
    index: EntryIndexSpec | None = None
    """None: queries see all entries before them."""

    def regions(self, dtype: str) -> tuple[Region, ...]:
        """Of the window. Every rank keeps all of it."""
        return (Region("keys", (self.dim,), dtype),)

    def parts(self, dtype: str) -> tuple[CachePart, ...]:
        """Keys of the window; what the next entries are made of; the entries."""
        window = CachePart(self.regions(dtype), self.window)
        if self.pool is None:
            return (window,)
        raw = exact(dtype)
        loose, entries = loose_regions("", self.pool, raw), [Region("entries", (self.dim,), dtype)]
        if self.index is not None:
            loose += loose_regions("index_", self.index.pool, raw)
            entries.append(Region("index_entries", (self.index.pool.dim,), dtype))
        every = self.pool.every
        return (window, CachePart(tuple(loose), self.pool.reach), CachePart(tuple(entries), None, every))


def exact(dtype: str) -> str:
    """The dtype of what entries are made of: a softmax's logits bear no eight bits."""
    return "bfloat16" if dtype == FP8 else dtype


def loose_regions(prefix: str, pool: PoolSpec, dtype: str) -> list[Region]:
    """What the entries of a pool are made of."""
    return [Region(f"{prefix}{name}", (pool.width,), dtype) for name in ("values", "gates")]


@dataclass(frozen=True, slots=True)
class CompressedCache:
    """One layer's paged vectors: [blocks, entries of a block, features] each."""

    keys: Tensor
    values: Tensor | None = None
    gates: Tensor | None = None
    entries: Tensor | None = None
    index_values: Tensor | None = None
    index_gates: Tensor | None = None
    index_entries: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loose:
    """What entries are made of, of this step's tokens, and how."""

    values: Tensor  # [tokens, width]
    gates: Tensor  # [tokens, width]
    bias: Tensor  # [every, width] float32, added to the gates by place
    norm: Tensor | None = None  # [dim] of the entry's RMS norm; None: entries stay as they are pooled
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """What an indexer asks with."""

    q: Tensor  # [tokens, index heads, dim], turned
    weights: Tensor  # [tokens, index heads] float32


@dataclass(frozen=True, slots=True)
class PoolProjected:
    """What an indexer of pools makes of the tokens."""

    loose: Loose
    query: EntryQuery


@dataclass(frozen=True, slots=True)
class CompressedProjected:
    """One layer's projections."""

    q: Tensor  # [tokens, heads, dim], normed and turned
    keys: Tensor  # [tokens, dim], normed and turned
    cos: Tensor  # [tokens, turned features / 2] float32, of the queries
    sin: Tensor
    loose: Loose | None = None
    index_loose: Loose | None = None
    index: EntryQuery | None = None
    entry_cos: Tensor | None = None  # as `cos`, of the first token of the entry that a token is in
    entry_sin: Tensor | None = None
