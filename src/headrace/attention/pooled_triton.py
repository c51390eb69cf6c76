"""The GPU backend of attention over pools of tokens: Triton kernels choose and attend. Lengths are read on the device,
so steps can be captured."""

from __future__ import annotations

from torch import Tensor

from headrace.attention._compressed import EntryIndexSpec, EntryQuery
from headrace.attention.latent_triton import LatentTriton
from headrace.attention.pooled_torch import PooledTorch
from headrace.attention.port import AttentionStep
from headrace.kernels._triton_index import launch_index_choice

__all__ = ["PooledTriton"]


class PooledTriton(PooledTorch):
    """As the oracle, by kernels."""

    def __init__(self) -> None:
        super().__init__()
        self._latent = LatentTriton()

    def _choose(self, query: EntryQuery, entries: Tensor, step: AttentionStep, index: EntryIndexSpec) -> Tensor:
        return launch_index_choice(
            query.q.contiguous(), query.weights, entries, step,
            top=index.top, scale=index.pool.dim**-0.5, every=index.pool.every,
            max_query=step.max_query, max_kv=step.max_kv,
        )  # fmt: skip
