"""The oracle backend of latent attention: plain torch on any device, keys and values never unfolded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention._latent import IndexProjected, LatentCache, LatentProjected, LatentSpec
from headrace.attention._layout import BlockLayout
from headrace.attention.port import AttentionStep
from headrace.kernels.index_choice import index_choice
from headrace.kernels.latent_attention import latent_attention, latent_write
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise_twin
from headrace.kernels.rope import apply_rope_twin

__all__ = ["LatentTorch"]


class LatentTorch(BlockLayout):
    """Slow and obvious: a row at a time over a gathered context."""

    kind: ClassVar[str] = "latent"

    def bind(self, regions: Mapping[str, Tensor]) -> LatentCache:
        """Latents, [blocks, block_size, dim]."""
        return LatentCache(**regions)

    def run(
        self,
        packed: LatentProjected,
        *,
        cache: LatentCache,
        step: AttentionStep,
        spec: LatentSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        """Write the latents, attend causally. -> [tokens, heads * v_dim]"""
        q = absorbed(packed, cache, step, spec)
        out = latent_attention(
            q, cache.latent, step,
            rank=spec.rank, scale=spec.scale, window=spec.window, sink_tokens=spec.sink_tokens,
            chosen=chosen(packed, cache, step, spec),
        )  # fmt: skip
        return quantise_twin(torch.einsum("thr,hvr->thv", out, packed.v_up).flatten(1), form)


def chosen(packed: LatentProjected, cache: LatentCache, step: AttentionStep, spec: LatentSpec) -> Tensor | None:
    """Write the indexer's keys and choose, where the layer has one. -> what queries see; None is everything"""
    if packed.choice is None:
        return None
    if packed.index is not None:
        assert spec.index is not None and cache.index_keys is not None and isinstance(packed.index, IndexProjected)
        latent_write(packed.index.k, cache.index_keys, step.write_slots)
        packed.choice.positions = index_choice(
            packed.index.q, packed.index.weights, cache.index_keys, step,
            top=spec.index.top, scale=spec.index.dim**-0.5,
        )  # fmt: skip
    assert packed.choice.positions is not None, "no layer before has chosen"
    return packed.choice.positions


def absorbed(packed: LatentProjected, cache: LatentCache, step: AttentionStep, spec: LatentSpec) -> Tensor:
    """Turn, write, and absorb the keys' function into the queries. -> [tokens, heads, rank + rope_dim]"""
    q_nope, q_rope = packed.q.split((spec.nope_dim, spec.rope_dim), -1)
    q_rope, k_rope = apply_rope_twin(
        q_rope, packed.k_rope[:, None], packed.cos, packed.sin, interleaved=packed.interleaved
    )
    latent_write(torch.cat((packed.latent, k_rope[:, 0]), -1), cache.latent, step.write_slots)
    return torch.cat((torch.einsum("thn,hnr->thr", q_nope, packed.k_up), q_rope), -1)
