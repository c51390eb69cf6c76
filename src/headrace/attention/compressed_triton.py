"""The GPU backend of compressed attention: Triton kernels. Lengths are read on the device, so steps can be captured."""

from __future__ import annotations

from torch import Tensor

from headrace.attention._compressed import EntryIndexSpec, EntryQuery
from headrace.attention.compressed_torch import CompressedTorch
from headrace.attention.port import AttentionStep
from headrace.kernels._triton_compressed import launch_compressed_attention
from headrace.kernels._triton_index import launch_index_choice
from headrace.kernels.quantise import quantise

__all__ = ["CompressedTriton"]


class CompressedTriton(CompressedTorch):
    """A program a query and some heads, prompts too. What entries are made of, and the entries, torch writes."""

    attention = staticmethod(launch_compressed_attention)
    quantise = staticmethod(quantise)

    def choose(
        self, query: EntryQuery, entries: Tensor, step: AttentionStep, *, every: int, spec: EntryIndexSpec
    ) -> Tensor:
        return launch_index_choice(
            query.q.contiguous(), query.weights, entries, step,
            top=spec.top, scale=spec.pool.dim**-0.5, every=every, max_query=step.max_query, max_kv=step.max_kv,
        )  # fmt: skip
