"""The GPU backend of latent attention: Triton kernels over paged latents. Lengths are read on the device, so steps can
be captured, as with those of attention over heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention._latent import IndexProjected, LatentCache, LatentProjected, LatentSpec
from headrace.attention._layout import BlockLayout
from headrace.attention.port import AttentionStep
from headrace.kernels._triton_decode import DecodePlan
from headrace.kernels._triton_index import launch_index_choice
from headrace.kernels._triton_latent import launch_latent, launch_latent_write, plan_latent
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise

__all__ = ["LatentTriton"]


class LatentTriton(BlockLayout):
    """Absorbed throughout: prompts too attend over latents. An FP8 cache holds vectors as they are (scale 1)."""

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
        q = self._absorbed(packed, cache, step, spec)
        chosen = self._chosen(packed, cache, step, spec)
        tokens, num_rows = q.shape[0], step.kv_lens.shape[0]
        attended = q.new_empty(tokens, spec.num_heads, spec.rank)
        common = {
            "out": attended, "scale": spec.scale, "window": spec.window, "sink_tokens": spec.sink_tokens,
            "chosen": chosen,
        }  # fmt: skip
        launch_latent(q, cache.latent, step, rows=(0, step.num_context_rows), max_query=step.max_query, **common)
        if step.num_context_rows < num_rows:
            plan = _decode_plan(step, spec, q, top=None if chosen is None else chosen.shape[1])
            launch_latent(
                q, cache.latent, step, rows=(step.num_context_rows, num_rows), max_query=1, plan=plan, **common
            )
        out = q.new_empty(tokens, spec.num_heads, spec.v_dim)
        torch.bmm(attended.transpose(0, 1), packed.v_up.transpose(1, 2), out=out.transpose(0, 1))
        flat = out.flatten(1)
        return Quantised(flat) if form.is_plain else quantise(flat, form)

    @staticmethod
    def _absorbed(packed: LatentProjected, cache: LatentCache, step: AttentionStep, spec: LatentSpec) -> Tensor:
        """Turn, write, and absorb the keys' function into the queries. -> [tokens, heads, rank + rope_dim]"""
        q, index = packed.q, packed.index
        assert index is None or isinstance(index, IndexProjected)
        absorbed = q.new_empty(q.shape[0], spec.num_heads, spec.rank + spec.rope_dim)
        launch_latent_write(
            q, packed.latent, packed.k_rope, packed.cos, packed.sin, cache.latent, step.write_slots,
            absorbed=absorbed, interleaved=packed.interleaved,
            index_k=None if index is None else index.k, index_keys=cache.index_keys,
        )  # fmt: skip
        target = absorbed[..., : spec.rank].transpose(0, 1)
        torch.bmm(q[..., : spec.nope_dim].transpose(0, 1), packed.k_up, out=target)
        return absorbed

    @staticmethod
    def _chosen(packed: LatentProjected, cache: LatentCache, step: AttentionStep, spec: LatentSpec) -> Tensor | None:
        """What queries see, chosen here or by a layer before; None is everything."""
        if packed.choice is None:
            return None
        if packed.index is not None:
            assert spec.index is not None and cache.index_keys is not None and isinstance(packed.index, IndexProjected)
            packed.choice.positions = launch_index_choice(
                packed.index.q, packed.index.weights, cache.index_keys, step,
                top=spec.index.top, scale=spec.index.dim**-0.5, max_query=step.max_query, max_kv=step.max_kv,
            )  # fmt: skip
        assert packed.choice.positions is not None, "no layer before has chosen"
        return packed.choice.positions


def _decode_plan(step: AttentionStep, spec: LatentSpec, q: Tensor, *, top: int | None) -> DecodePlan:
    key = f"latent {spec.num_heads} {spec.rank} {top}"
    if key not in step.scratch:
        max_kv = step.max_kv if top is None else min(step.max_kv, top)
        if spec.window is not None and not spec.sink_tokens:
            max_kv = min(max_kv, spec.window + step.block_size)
        step.scratch[key] = plan_latent(
            step.kv_lens.shape[0] - step.num_context_rows, spec.num_heads, spec.rank,
            dtype=q.dtype, max_kv=max_kv, device=q.device,
        )  # fmt: skip
    return step.scratch[key]
