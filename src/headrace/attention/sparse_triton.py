"""The GPU backend of sparse attention: Triton kernels that read the chosen blocks. Lengths are read on the device."""

from __future__ import annotations

from headrace.attention._sparse import SparseCache, SparseProjected, SparseSpec
from headrace.attention.port import AttentionStep
from headrace.attention.sparse_torch import SparseTorch
from headrace.kernels._triton_rope import launch_rope_write
from headrace.kernels._triton_sparse import launch_block_choice, launch_sparse_attention
from headrace.kernels.latent_attention import latent_write
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise

__all__ = ["SparseTriton"]


class SparseTriton(SparseTorch):
    """A program a query and KV head, prompts too."""

    def run(
        self,
        packed: SparseProjected,
        *,
        cache: SparseCache,
        step: AttentionStep,
        spec: SparseSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        """Write k, v and index keys, choose, attend causally. -> [tokens, heads * dim]"""
        heads = spec.heads
        k, v = cache.heads.k, cache.heads.v
        q = launch_rope_write(packed.heads, k, v, step.write_slots, k_scale=heads.k_scale, v_scale=heads.v_scale)
        latent_write(packed.index_k, cache.index_keys, step.write_slots)
        chosen = launch_block_choice(
            packed.index_q.contiguous(), cache.index_keys, step, spec.index,
            max_query=step.max_query, max_kv=step.max_kv,
        )  # fmt: skip
        out = launch_sparse_attention(q, k, v, step, heads, chosen=chosen, block=spec.index.block)
        return quantise(out.flatten(1), form)
