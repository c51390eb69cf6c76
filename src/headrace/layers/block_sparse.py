"""Attention over chosen blocks of tokens (MiniMax Sparse Attention, 2026): index heads, one for each KV head."""

from __future__ import annotations

from torch import Tensor

from headrace.attention._sparse import SparseProjected, SparseSpec
from headrace.kernels.block_choice import BlockIndexSpec as BlockIndexSpec
from headrace.kernels.rope import apply_rope
from headrace.layers.attention import Attention
from headrace.layers.factory import LayerFactory
from headrace.layers.linear import Linear, Output
from headrace.layers.norm import HeadNorm, Norm
from headrace.layers.port import Act, ForwardStep, Mixer, Rope

BLOCK_INDEX_RULES = {
    f"model.layers.*.self_attn.{published}{part}": f"layers.*.attention.index.{ours}"
    for published in ("index_", "indexer.")
    for part, ours in (
        ("q_proj.*", "q.*:q"),
        ("k_proj.*", "k.*"),
        ("q_norm.weight", "q_norm.weight"),
        ("k_norm.weight", "k_norm.weight"),
    )
}
"""The published names, and those that transformers has."""


class BlockIndexer:
    """Queries of this rank's index heads, and the key that they share."""

    def __init__(self, *, q: Linear, k: Linear, q_norm: HeadNorm, k_norm: HeadNorm, spec: BlockIndexSpec) -> None:
        self.q = q
        self.k = k
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.spec = spec

    def project(self, act: Act, rope: Rope) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> ([tokens, kv_heads, dim], [tokens, dim])"""
        q = self.q_norm(self.q(act).unflatten(-1, (-1, self.spec.dim)).contiguous())
        k = self.k_norm(self.k(act)[:, None].contiguous())
        q, k = apply_rope(q, k, rope.cos, rope.sin)
        return q, k[:, 0]


class SparseAttention:
    """Attention over heads with an indexer beside it."""

    def __init__(self, attention: Attention, indexer: BlockIndexer) -> None:
        self.attention = attention
        self.indexer = indexer

    @property
    def spec(self) -> SparseSpec:
        return SparseSpec(self.attention.spec, self.indexer.spec)

    def feed_from(self, norm: Norm) -> None:
        """Several products take what the norm yields, so it stays plain."""

    def project(self, act: Act, step: ForwardStep) -> SparseProjected:
        assert self.attention.rope is not None
        q, k = self.indexer.project(act, step.ropes[self.attention.rope])
        return SparseProjected(self.attention.project(act, step), q, k)

    def attend(self, mixer_input: SparseProjected, mixer: Mixer) -> Act:
        return self.attention.attend(mixer_input, mixer)

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * dim] -> [tokens, hidden], partial"""
        return self.attention.output(mixed)


def block_indexer(
    factory: LayerFactory,
    name: str,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    spec: BlockIndexSpec,
    eps: float,
) -> BlockIndexer:
    """Modules `{name}.q` (slot q), `{name}.k`, `{name}.q_norm` and `{name}.k_norm`. Heads are the attention's, of the
    whole model."""
    start, stop = factory.parallel.heads(num_heads, num_kv_heads).kv
    outputs = [Output("q", num_kv_heads * spec.dim, (start * spec.dim, stop * spec.dim))]
    return BlockIndexer(
        q=factory.column(f"{name}.q", hidden_size, outputs, bias=False),
        k=factory.linear(f"{name}.k", hidden_size, spec.dim),
        q_norm=factory.head_norm(f"{name}.q_norm", spec.dim, eps=eps, plus_one=True),
        k_norm=factory.head_norm(f"{name}.k_norm", spec.dim, eps=eps, plus_one=True),
        spec=spec,
    )
