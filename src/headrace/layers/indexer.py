"""The indexer of DeepSeek Sparse Attention (DeepSeek-AI 2025): which tokens a layer's queries see."""

from __future__ import annotations

from headrace.attention._latent import IndexProjected, IndexSpec
from headrace.kernels.rope import apply_rope
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.layers.port import Act, Rope

INDEXER_RULES = {
    "model.layers.*.self_attn.indexer.wq_b.*": "layers.*.attention.indexer.q.*",
    "model.layers.*.self_attn.indexer.wk.*": "layers.*.attention.indexer.k.*",
    "model.layers.*.self_attn.indexer.k_norm.*": "layers.*.attention.indexer.k_norm.*",
    "model.layers.*.self_attn.indexer.weights_proj.*": "layers.*.attention.indexer.weights.*",
}
"""The names that Hugging Face checkpoints use."""

NORM_EPS = 1e-6
FULL, SHARED = "full", "shared"
"""A layer chooses itself, or takes the choice of an earlier one."""


class Indexer:
    """Queries, keys and head weights of the indexer. Every rank computes all of it."""

    def __init__(
        self, *, q: Linear, k: Linear, k_norm: Norm, weights: Linear, spec: IndexSpec, interleaved: bool
    ) -> None:
        """
        Args:
            interleaved: rope turns neighbouring features (2i, 2i + 1), not i and i + half.
        """
        self.q = q
        self.k = k
        self.k_norm = k_norm
        self.weights = weights
        self.spec = spec
        self.interleaved = interleaved

    def project(self, act: Act, q_act: Act, rope: Rope) -> IndexProjected:
        """
        Args:
            act: [tokens, hidden], what the layer's first products take.
            q_act: [tokens, q rank], what queries are made of.
        """
        q = self.q(q_act).unflatten(-1, (self.spec.num_heads, self.spec.dim))
        k = self.k_norm(None, self.k(act))[0].data[:, None]
        q, k = apply_rope(q, k, rope.cos, rope.sin, interleaved=self.interleaved)
        weights = self.weights(act).float() * self.spec.num_heads**-0.5
        return IndexProjected(q, k[:, 0], weights)


def indexer(
    factory: LayerFactory, name: str, *, hidden_size: int, q_rank: int, spec: IndexSpec, interleaved: bool
) -> Indexer:
    """Modules `{name}.q`, `{name}.k`, `{name}.k_norm` and `{name}.weights`, which is plain in every checkpoint."""
    return Indexer(
        q=factory.linear(f"{name}.q", q_rank, spec.num_heads * spec.dim),
        k=factory.linear(f"{name}.k", hidden_size, spec.dim),
        k_norm=factory.layer_norm(f"{name}.k_norm", spec.dim, eps=NORM_EPS, bias=True),
        weights=factory.plain_linear(f"{name}.weights", hidden_size, spec.num_heads),
        spec=spec,
        interleaved=interleaved,
    )


def indexer_kinds(config: HfConfig, *, first: int = 0) -> list[str]:
    """`full` or `shared` by layer: stated, as a pattern of F and S, or every so many layers.

    Args:
        first: layer that attends.
    """
    count = config.integer("num_hidden_layers")
    pattern = config.get("index_topk_pattern")
    stated = config.words("indexer_types") or (
        pattern if isinstance(pattern, str) else config.words("index_topk_pattern")
    )
    if not stated:
        every = max(config.integer("index_topk_freq", 1, least=0), 1)
        offset = config.integer("index_skip_topk_offset", 2, least=0)
        return [SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(count)]
    kinds = [{"F": FULL, "S": SHARED}.get(kind, str(kind)) for kind in stated]
    if len(kinds) != count or set(kinds) - {FULL, SHARED} or kinds[first] != FULL:
        raise ValueError(
            f"{config.place}: indexer_types must state full or shared for each of {count} layers, the first one that"
            f" attends full, not {stated!r}"
        )
    return kinds
