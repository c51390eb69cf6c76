"""The oracle backend of attention over pools of tokens: plain torch on any device. It asks the device for lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.attention._compressed import EntryIndexSpec, EntryQuery, PoolProjected
from headrace.attention._latent import LatentCache, LatentProjected
from headrace.attention._layout import BlockLayout
from headrace.attention._pooled import PooledCache, PooledSpec
from headrace.attention.compressed_torch import add_entries
from headrace.attention.latent_cpu import LatentCpu
from headrace.attention.port import AttentionStep
from headrace.kernels.compressed_attention import entry_choice
from headrace.kernels.pool_windows import closing_tokens
from headrace.kernels.quantise import PLAIN, Form, Quantised

__all__ = ["PooledTorch"]


class PooledTorch(BlockLayout):
    """Chooses, and leaves attending to the backend of latent attention."""

    kind: ClassVar[str] = "pooled"

    def __init__(self) -> None:
        self._latent: Any = LatentCpu()
        """A backend of latent attention."""

    def bind(self, regions: Mapping[str, Tensor]) -> PooledCache:
        """[blocks, entries of a block, features] each."""
        others = {name: region for name, region in regions.items() if name != "latent"}
        return PooledCache(LatentCache(regions["latent"]), **others)

    def run(
        self,
        packed: LatentProjected,
        *,
        cache: PooledCache,
        step: tuple[AttentionStep, ...],
        spec: PooledSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        """Write latents and what pools are made of, make those that are complete, choose, attend.

        -> [tokens, heads * v_dim]
        """
        latent_step, loose_step, entry_step = step
        index, pool = packed.index, spec.index.pool
        assert isinstance(index, PoolProjected) and packed.choice is not None
        add_entries(
            index.loose, cache.index_values, cache.index_gates, cache.index_entries, loose_step, entry_step,
            closing=closing_tokens(loose_step.positions, pool.every, num_rows=loose_step.kv_lens.shape[0]), pool=pool,
        )  # fmt: skip
        pools = self._choose(index.query, cache.index_entries, entry_step, spec.index)
        packed.choice.positions = tokens_of(pools, latent_step.positions, every=pool.every)
        return self._latent.run(
            replace(packed, index=None), cache=cache.latent, step=latent_step, spec=spec.latent, form=form
        )

    def _choose(self, query: EntryQuery, entries: Tensor, step: AttentionStep, index: EntryIndexSpec) -> Tensor:
        """[tokens, top] int64, -1 where there are fewer"""
        pool = index.pool
        return entry_choice(
            query.q, query.weights, entries, step, every=pool.every, top=index.top, scale=pool.dim**-0.5
        )


def tokens_of(pools: Tensor, positions: Tensor, *, every: int) -> Tensor:
    """The tokens of chosen pools, and those up to each query's own that make no whole pool.

    pools: [tokens, top], -1 for none -> [tokens, top * every + every - 1], -1 for none, which come last
    """
    inside = torch.arange(every, device=pools.device)
    whole = (pools[..., None] * every + inside).masked_fill(pools[..., None] < 0, -1).flatten(1)
    tail = (positions[:, None] + 1) // every * every + inside[: every - 1]
    found = torch.cat((whole, tail.masked_fill(tail > positions[:, None], -1)), 1)
    return found.sort(1, descending=True).values
