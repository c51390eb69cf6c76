"""Prompts on FlashInfer's kernels, where that package is installed, over the cache as the Triton kernels have it.

Its schedules are made on the host, so it computes prompts of steps that don't run as CUDA graphs: the long ones.
Generated tokens, and prompts in graphs, stay with the Triton kernels, which read lengths on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from headrace.attention._flashinfer_plan import Kernel, Planner, package, unsupported
from headrace.attention._flashinfer_rules import Rule, min_query
from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.attention.triton import TritonAttention
from headrace.kernels._triton_decode import launch_decode
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised, quantise
from headrace.kernels.rope_write import Projected, rope_write

__all__ = ["FlashInferAttention"]


class FlashInferAttention(TritonAttention):
    """A query's result depends on its row's history, and by rounding on which kernels its step went to."""

    def __init__(self, *, rules: Sequence[Rule] | None = None) -> None:
        """
        Args:
            rules: which prompts go to FlashInfer; None is all that it can compute.

        Raises:
            ValueError: the package isn't installed, or can't be imported.
        """
        package()
        self._rules = rules
        self._planners: dict[torch.device, Planner] = {}

    def prepare(
        self,
        specs: Iterable[AttentionSpec],
        *,
        device: torch.device,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        """Compile and load the kernels of these layers, as far as they go to FlashInfer: before the first prompt."""
        kernels = [
            Kernel.of(spec, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)
            for spec in specs
            if self._min_query(spec, device, dtype=dtype, kv_dtype=kv_dtype) is not None
        ]
        if kernels:
            self._planner(device).prepare(kernels)

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        """Write k, v, attend causally. -> [tokens, heads * dim]"""
        dtype, kv_dtype, device = packed.qkv.dtype, cache.k.dtype, packed.qkv.device
        least = self._min_query(spec, device, dtype=dtype, kv_dtype=kv_dtype)
        if not step.context_rows or least is None or step.max_query < least:
            return super().run(packed, cache=cache, step=step, spec=spec, form=form)
        q = rope_write(packed, cache.k, cache.v, step.write_slots, k_scale=spec.k_scale, v_scale=spec.v_scale)
        out = q.new_empty(q.shape)
        kernel = Kernel.of(spec, block_size=step.block_size, dtype=dtype, kv_dtype=kv_dtype)
        num_tokens = sum(count for count, _ in step.context_rows)
        is_fp8 = kv_dtype == FP8
        self._planner(device).planned(step, kernel).run(
            q[:num_tokens],
            (cache.k, cache.v),
            k_scale=spec.k_scale if is_fp8 else None,
            v_scale=spec.v_scale if is_fp8 else None,
            out=out[:num_tokens],
            enable_pdl=False,
        )
        flat = Quantised(out.flatten(1))
        if step.num_context_rows < step.kv_lens.shape[0]:
            plan = self._decode_plan(step, spec, device)
            launch_decode(
                q, cache.k, cache.v, step, spec, out=flat, form=PLAIN, plan=plan, first_row=step.num_context_rows
            )
        return quantise(flat.data, form)

    def _min_query(
        self, spec: AttentionSpec, device: torch.device, *, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> int | None:
        """Tokens of the longest prompt from which on the layer's prompts go to FlashInfer; None is never."""
        if unsupported(spec, dtype=dtype, kv_dtype=kv_dtype) is not None:
            return None
        if self._rules is None:
            return 1
        return min_query(self._rules, spec, kv_dtype=kv_dtype, capability=torch.cuda.get_device_capability(device))

    def _planner(self, device: torch.device) -> Planner:
        if device not in self._planners:
            self._planners[device] = Planner(device)
        return self._planners[device]
