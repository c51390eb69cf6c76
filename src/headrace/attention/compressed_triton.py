"""The GPU backend of compressed attention: Triton kernels. Lengths are read on the device, so steps can be captured."""

from __future__ import annotations

from headrace.attention._compressed import CompressedCache, CompressedProjected, CompressedSpec
from headrace.attention.compressed_torch import CompressedTorch
from headrace.attention.port import AttentionStep
from headrace.kernels._triton_compressed import launch_compressed_attention
from headrace.kernels._triton_index import launch_index_choice
from headrace.kernels.latent_attention import latent_write
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise

__all__ = ["CompressedTriton"]


class CompressedTriton(CompressedTorch):
    """A program a query and some heads, prompts too. What entries are made of, and the entries, torch writes."""

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
        common = {"scale": spec.scale, "sinks": spec.sinks, "window": spec.window}
        q = packed.q.contiguous()
        if spec.pool is None:
            return quantise(launch_compressed_attention(q, cache.keys, window, **common).flatten(1), form)
        loose_step, entry_step = others
        self._compress(packed, cache, loose_step, entry_step, spec)
        chosen = None
        if spec.index is not None:
            assert packed.index is not None and cache.index_entries is not None
            chosen = launch_index_choice(
                packed.index.q.contiguous(), packed.index.weights, cache.index_entries, entry_step,
                top=spec.index.top, scale=spec.index.pool.dim**-0.5, every=spec.pool.every,
                max_query=entry_step.max_query, max_kv=entry_step.max_kv,
            )  # fmt: skip
        out = launch_compressed_attention(
            q, cache.keys, window,
            entries=cache.entries, entry_step=entry_step, every=spec.pool.every, chosen=chosen, **common,
        )  # fmt: skip
        return quantise(out.flatten(1), form)
