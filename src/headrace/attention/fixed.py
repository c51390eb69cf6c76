"""The GPU backend for `deterministic: true`: every row goes the prompts' way, in tiles that depend on nothing."""

from __future__ import annotations

import torch

from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.attention.triton import TritonAttention
from headrace.kernels._triton_prefill import launch_prefill
from headrace.kernels._triton_rope import launch_rope_write
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise
from headrace.kernels.rope_write import Projected

__all__ = ["FixedAttention"]


class FixedAttention(TritonAttention):
    """A query's result has the same bits in any batch, chunk and block table. Slower for rows of one token."""

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Write k, v, attend causally. -> [tokens, heads * dim]"""
        q = launch_rope_write(packed, cache.k, cache.v, step.write_slots, k_scale=spec.k_scale, v_scale=spec.v_scale)
        out = Quantised(torch.empty((q.shape[0], spec.num_heads * spec.head_dim), dtype=q.dtype, device=q.device))
        launch_prefill(
            q, cache.k, cache.v, step, spec,
            out=out, form=PLAIN, num_rows=step.kv_lens.shape[0], max_query=step.max_query, is_fixed=True,
        )  # fmt: skip
        return quantise(out.data, form)
