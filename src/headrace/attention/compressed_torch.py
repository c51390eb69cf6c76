"""The oracle backend of compressed attention: plain torch on any device. It asks the device for lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention._compressed import (
    CompressedCache,
    CompressedProjected,
    CompressedSpec,
    EntryIndexSpec,
    EntryQuery,
    Loose,
)
from headrace.attention._layout import BlockLayout
from headrace.attention.port import AttentionStep
from headrace.kernels.compressed_attention import compressed_attention, entry_choice
from headrace.kernels.latent_attention import latent_write
from headrace.kernels.pool_windows import PoolSpec, closing_tokens, entry_slots, pool_windows
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise_twin
from headrace.kernels.rope import turn_last
from headrace.seam import DUMMY_BLOCK

__all__ = ["CompressedTorch"]


class CompressedTorch(BlockLayout):
    """Slow and obvious: a row at a time over a gathered context."""

    kind: ClassVar[str] = "compressed"
    attention = staticmethod(compressed_attention)
    quantise = staticmethod(quantise_twin)

    def bind(self, regions: Mapping[str, Tensor]) -> CompressedCache:
        """[blocks, entries of a block, features] each."""
        return CompressedCache(**regions)

    def run(
        self,
        packed: CompressedProjected,
        *,
        cache: CompressedCache,
        step: tuple[AttentionStep, ...],
        spec: CompressedSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        """Write keys and what entries are made of, make those that are complete, choose, attend.

        -> [tokens, heads * dim]
        """
        window, *others = step
        latent_write(packed.keys, cache.keys, window.write_slots)
        q, common = packed.q.contiguous(), {"scale": spec.scale, "sinks": spec.sinks, "window": spec.window}
        if spec.pool is None:
            return self.quantise(self.attention(q, cache.keys, window, **common).flatten(1), form)
        loose_step, entry_step = others
        every = spec.pool.every
        self._compress(packed, cache, loose_step, entry_step, spec)
        chosen = None
        if spec.index is not None:
            assert packed.index is not None and cache.index_entries is not None
            chosen = self.choose(packed.index, cache.index_entries, entry_step, every=every, spec=spec.index)
        out = self.attention(
            q, cache.keys, window, entries=cache.entries, entry_step=entry_step, every=every, chosen=chosen, **common
        )
        return self.quantise(out.flatten(1), form)

    def choose(
        self, query: EntryQuery, entries: Tensor, step: AttentionStep, *, every: int, spec: EntryIndexSpec
    ) -> Tensor:
        """-> [tokens, top] int64, as of `entry_choice`"""
        scale = spec.pool.dim**-0.5
        return entry_choice(query.q, query.weights, entries, step, every=every, top=spec.top, scale=scale)

    def _compress(
        self,
        packed: CompressedProjected,
        cache: CompressedCache,
        loose_step: AttentionStep,
        entry_step: AttentionStep,
        spec: CompressedSpec,
    ) -> None:
        """Write what entries are made of, and the entries that are complete with this step's tokens."""
        assert spec.pool is not None and packed.entry_cos is not None and packed.entry_sin is not None
        closing = closing_tokens(loose_step.positions, spec.pool.every, num_rows=loose_step.kv_lens.shape[0])
        rope = (packed.entry_cos[closing[0]], packed.entry_sin[closing[0]])
        parts = [(packed.loose, cache.values, cache.gates, cache.entries, spec.pool)]
        if spec.index is not None:
            index = (packed.index_loose, cache.index_values, cache.index_gates, cache.index_entries, spec.index.pool)
            parts.append(index)
        for loose, values, gates, entries, pool in parts:
            assert loose is not None and values is not None and gates is not None and entries is not None
            add_entries(loose, values, gates, entries, loose_step, entry_step, closing=closing, pool=pool, rope=rope)


def add_entries(
    loose: Loose,
    values: Tensor,
    gates: Tensor,
    entries: Tensor,
    loose_step: AttentionStep,
    entry_step: AttentionStep,
    *,
    closing: tuple[Tensor, Tensor],
    pool: PoolSpec,
    rope: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write this step's part of what entries are made of, and the entries that it completes.

    Args:
        values, gates, entries: paged.
        closing: as of `closing_tokens`. Those that complete none write to the dummy block.
        rope: cos and sin of each entry.
    """
    latent_write(loose.values, values, loose_step.write_slots)
    latent_write(loose.gates, gates, loose_step.write_slots)
    tokens, is_one = closing
    made = pool_windows(values, gates, loose_step, tokens, bias=loose.bias, spec=pool)
    if loose.norm is not None:
        made = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + loose.eps) * loose.norm.float()
    if rope is not None:
        made = turn_last(made[:, None], *rope)[:, 0]
    blocks, inside = entry_slots(entry_step, tokens, every=pool.every, entries=entries.shape[1])
    latent_write(made, entries, (blocks * entries.shape[1] + inside).masked_fill(~is_one, DUMMY_BLOCK))
