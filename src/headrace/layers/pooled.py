"""Latent attention whose indexer scores pools of tokens by compressed keys (GLM-5.3-Flash, Zhipu AI 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention._compressed import EntryIndexSpec as EntryIndexSpec
from headrace.attention._compressed import EntryQuery, Loose, PoolProjected
from headrace.attention._compressed import PoolSpec as PoolSpec
from headrace.attention._latent import LatentProjected
from headrace.attention._pooled import PooledSpec
from headrace.layers.factory import LayerFactory
from headrace.layers.indexer import INDEXER_RULES, NORM_EPS
from headrace.layers.latent import LatentAttention
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, Mixer, Rope
from headrace.layers.recurrent import SmallWeights
from headrace.layers.weights import Slot

POOL_INDEXER_RULES = {
    **INDEXER_RULES,
    "model.layers.*.self_attn.indexer.index_kpool_compress_gate": "layers.*.attention.indexer.gates.weight",
    "model.layers.*.self_attn.indexer.index_kpool_compress_ape": "layers.*.attention.indexer.bias",
}
"""The names that Hugging Face checkpoints use."""


class PoolIndexer:
    """Queries, and what the keys of pools are made of. Every rank computes all of it; nothing is turned."""

    def __init__(
        self,
        *,
        q: Linear,
        k: Linear,
        k_norm: Norm,
        gates: Linear,
        weights: Linear,
        small: SmallWeights,
        spec: EntryIndexSpec,
    ) -> None:
        self.q = q
        self.k = k
        self.k_norm = k_norm
        self.gates = gates
        self.weights = weights
        self.small = small
        self.spec = spec

    def project(self, act: Act, q_act: Act, rope: Rope) -> PoolProjected:
        """As of `layers/indexer.py: Indexer`."""
        q = self.q(q_act).unflatten(-1, (self.spec.num_heads, self.spec.pool.dim))
        loose = Loose(self.k_norm(None, self.k(act))[0].data, self.gates(act), self.small["bias"])
        return PoolProjected(loose, EntryQuery(q, self.weights(act).float() * self.spec.num_heads**-0.5))


class PooledAttention:
    """Latent attention with such an indexer, which it has been given too."""

    def __init__(self, latent: LatentAttention, index: EntryIndexSpec) -> None:
        self.latent = latent
        self.spec = PooledSpec(latent.spec, index)

    def feed_from(self, norm: Norm) -> None:
        """Several products take what the norm yields, so it stays plain."""

    def project(self, act: Act, step: ForwardStep) -> LatentProjected:
        return self.latent.project(act, step)

    def attend(self, mixer_input: LatentProjected, mixer: Mixer) -> Act:
        return self.latent.attend(mixer_input, mixer)

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * v_dim] -> [tokens, hidden], partial"""
        return self.latent.output(mixed)


def pool_indexer(
    factory: LayerFactory, name: str, *, hidden_size: int, q_rank: int, spec: EntryIndexSpec
) -> PoolIndexer:
    """Modules `{name}.q`, `{name}.k`, `{name}.k_norm`, and plain in every checkpoint `{name}.gates`, `{name}.weights`
    and `{name}.bias`."""
    small = SmallWeights(
        name,
        {"bias": [Slot("", (spec.pool.every, spec.pool.dim))]},
        dtypes={"bias": factory.dtype},
        device=factory.device,
    )
    factory.modules.append(small)
    return PoolIndexer(
        q=factory.linear(f"{name}.q", q_rank, spec.num_heads * spec.pool.dim),
        k=factory.linear(f"{name}.k", hidden_size, spec.pool.dim),
        k_norm=factory.layer_norm(f"{name}.k_norm", spec.pool.dim, eps=NORM_EPS, bias=True),
        gates=factory.plain_linear(f"{name}.gates", hidden_size, spec.pool.dim),
        weights=factory.plain_linear(f"{name}.weights", hidden_size, spec.num_heads),
        small=small,
        spec=spec,
    )


def no_features(positions: Tensor) -> Rope:
    """The rope of a model that turns nothing."""
    nothing = torch.empty(positions.shape[0], 0, dtype=torch.float32, device=positions.device)
    return Rope(nothing, nothing)
