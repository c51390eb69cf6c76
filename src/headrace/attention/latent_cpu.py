"""The CPU backend of latent attention: as the oracle, but that rows of one token attend together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.attention._latent import LatentCache, LatentProjected, LatentSpec
from headrace.attention.latent_torch import LatentTorch, absorbed, chosen
from headrace.attention.port import AttentionStep
from headrace.kernels.latent_attention import latent_attention, latent_decode
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise

__all__ = ["LatentCpu"]


class LatentCpu(LatentTorch):
    """Rows of several tokens one by one, the others as a batch."""

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
        q, seen = absorbed(packed, cache, step, spec), chosen(packed, cache, step, spec)
        options = {
            "rank": spec.rank, "scale": spec.scale, "window": spec.window, "sink_tokens": spec.sink_tokens,
        }  # fmt: skip
        rows, parts = step.num_context_rows, list[Tensor]()
        first = int(step.query_starts[rows])
        if rows:
            context = replace(step, query_starts=step.query_starts[: rows + 1], kv_lens=step.kv_lens[:rows])
            some = None if seen is None else seen[:first]
            parts.append(latent_attention(q[:first], cache.latent, context, chosen=some, **options))
        if rows < len(step.kv_lens):
            single = replace(
                step, kv_lens=step.kv_lens[rows:], positions=step.positions[first:],
                block_tables=step.block_tables[rows:],
            )  # fmt: skip
            some = None if seen is None else seen[first:]
            parts.append(latent_decode(q[first:], cache.latent, single, chosen=some, **options))
        out = torch.bmm(torch.cat(parts).transpose(0, 1), packed.v_up.transpose(1, 2)).transpose(0, 1)
        return quantise(out.flatten(1), form)
