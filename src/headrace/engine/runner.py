"""The runner: owns the loop over a model's layers, and ties each layer to its cache and its group's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, AttentionSpec, AttentionStep, LayerCache
from headrace.engine.pools import KvPools
from headrace.layers.port import Act, ForwardStep, Model


@dataclass(slots=True)
class BoundAttention:
    """Attention over one layer's cache in one step: the mixer that the runner hands to a layer."""

    backend: AttentionBackend
    cache: LayerCache
    step: AttentionStep
    spec: AttentionSpec

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend.run(q, k, v, cache=self.cache, step=self.step, spec=self.spec)


class Runner:
    """Runs one model on one rank over its KV pools."""

    def __init__(self, model: Model, backend: AttentionBackend, pools: KvPools) -> None:
        assert pools.num_layers == len(model.layers), (pools.num_layers, len(model.layers))
        self.model = model
        self.backend = backend
        self.pools = pools
        self._group_of = {layer: index for index, group in enumerate(pools.groups) for layer in group.layers}

    @torch.inference_mode()
    def forward(self, ids: Tensor, groups: Sequence[AttentionStep], *, rows: Tensor | None = None) -> Tensor:
        """Compute packed rows and write their KV.

        Args:
            ids: [tokens] int64.
            groups: the step of each layer group, in the pools' order; all with the same positions.
            rows: [rows] int64, the packed tokens whose hidden states are wanted; None is all.

        Returns:
            [rows, hidden] after the last norm: what the head takes, and what embeddings are read from.
        """
        assert len(groups) == len(self.pools.groups), "one AttentionStep a layer group"
        model = self.model
        for group in groups:
            self.backend.plan(group)
        positions = groups[0].positions
        step = ForwardStep(positions, model.ropes(positions))
        partial, residual = None, model.embed(ids)
        for index, layer in enumerate(model.layers):
            mixer_input, residual = layer.before(partial, residual, step)
            mixer = BoundAttention(self.backend, self.pools.layer(index), groups[self._group_of[index]], layer.spec)
            partial, residual = layer.after(layer.mix(mixer_input, mixer), residual)
        if rows is not None:
            partial, residual = None if partial is None else partial[rows], residual[rows]
        return model.final(partial, residual).data

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] as `forward` returned it -> float32 logits [rows, vocab], the same on every rank"""
        return self.model.head(Act(hidden))
