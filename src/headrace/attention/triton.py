"""The GPU backend: Triton kernels over the paged cache. Lengths are read on the device, so steps can be captured.

Rows of one token go to the decode kernel, the others to the prefill kernel. A grid depends on the padded number of rows
and on `max_query` and `max_kv`, which have to bound every replay of a captured step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention._layout import BlockLayout
from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.kernels._triton_decode import DecodePlan, launch_decode, plan_decode
from headrace.kernels._triton_prefill import launch_prefill
from headrace.kernels._triton_rope import launch_rope_write
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised, quantise
from headrace.kernels.rope_write import Projected

__all__ = ["TritonAttention"]

MAX_HEAD_DIM = 512
"""A tile holds whole heads, so that registers and shared memory bound them."""


class TritonAttention(BlockLayout):
    """A query's result depends on its row's history, and by rounding on how many rows share the step."""

    kind: ClassVar[str] = "heads"

    def block_shape(self, shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
        """As the other backends have it. ValueError for heads that no tile of the kernels holds."""
        if shape[-1] > MAX_HEAD_DIM:
            raise ValueError(
                f"the Triton attention kernels take heads of at most {MAX_HEAD_DIM} features, and this model's have"
                f" {shape[-1]}: set attn_backend to VANILLA"
            )
        return super().block_shape(shape, block_size)

    def bind(self, regions: Mapping[str, Tensor]) -> LayerCache:
        """K and V, [blocks, heads, block_size, dim] each."""
        return LayerCache(**regions)

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Write k, v, attend causally. -> [tokens, heads * dim]"""
        q = launch_rope_write(packed, cache.k, cache.v, step.write_slots, k_scale=spec.k_scale, v_scale=spec.v_scale)
        in_kernel = form if form.kind == "static" else PLAIN
        dtype = q.dtype if in_kernel.is_plain else FP8
        shape = (q.shape[0], spec.num_heads * spec.head_dim)
        out = Quantised(torch.empty(shape, dtype=dtype, device=q.device), in_kernel.scale)
        launch_prefill(
            q, cache.k, cache.v, step, spec,
            out=out, form=in_kernel, num_rows=step.num_context_rows, max_query=step.max_query,
        )  # fmt: skip
        if step.num_context_rows < step.kv_lens.shape[0]:
            plan = self._decode_plan(step, spec, q.device)
            launch_decode(
                q, cache.k, cache.v, step, spec, out=out, form=in_kernel, plan=plan, first_row=step.num_context_rows
            )
        return out if form.is_plain or form.kind == "static" else quantise(out.data, form)

    @staticmethod
    def _decode_plan(step: AttentionStep, spec: AttentionSpec, device: torch.device) -> DecodePlan:
        key = f"decode {spec.num_heads} {spec.num_kv_heads} {spec.head_dim}"
        if key not in step.scratch:
            num_rows = step.kv_lens.shape[0] - step.num_context_rows
            max_kv = step.max_kv
            if spec.window is not None and not spec.sink_tokens:
                max_kv = min(max_kv, spec.window + step.block_size)
            step.scratch[key] = plan_decode(
                num_rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, max_kv=max_kv, device=device
            )
        return step.scratch[key]
