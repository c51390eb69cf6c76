"""The runner: owns the loop over a model's layers, and ties each layer to its cache and its group's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, AttentionStep, CacheSpec
from headrace.engine.backends import Backends
from headrace.engine.groups import WHOLE, Reach
from headrace.engine.pools import KvPools
from headrace.kernels.quantise import Form
from headrace.layers.port import Act, ForwardStep, LiveState, Model, StateStep

GroupStep = AttentionStep | StateStep
NO_STATES: Mapping[int, tuple[Tensor, ...]] = {}


@dataclass(slots=True)
class BoundAttention:
    """Attention over one layer's cache in one step: the mixer that the runner hands to a layer."""

    backend: AttentionBackend
    cache: Any
    step: AttentionStep
    spec: Any

    def __call__(self, mixer_input: Any, form: Form) -> Act:
        return self.backend.run(mixer_input, cache=self.cache, step=self.step, spec=self.spec, form=form)


class Runner:
    """Runs one model on one rank over its KV pools and recurrent states."""

    def __init__(
        self,
        model: Model,
        backends: Backends,
        pools: KvPools,
        *,
        states: Mapping[int, tuple[Tensor, ...]] = NO_STATES,
        reach: Reach = WHOLE,
    ) -> None:
        """
        Args:
            states: by recurrent layer, its live states: `States.layers`.
            reach: as the pools' groups were made with.
        """
        self.model = model
        self.backends = [backends.of(group.attention) for group in pools.groups]
        """By group; those of recurrent groups have nothing to do."""
        self.pools = pools
        self.states = states
        self.reach = reach
        self._group_of = {layer: index for index, group in enumerate(pools.groups) for layer in group.layers}
        assert pools.num_layers + len(states) == len(self._group_of), (pools.num_layers, len(states))

    @torch.inference_mode()
    def forward(self, ids: Tensor, groups: Sequence[GroupStep], *, rows: Tensor | None = None) -> Tensor:
        """Compute packed rows and write their KV and states.

        Args:
            ids: [tokens] int64.
            groups: the step of each layer group, in the pools' order; all with the same positions.
            rows: [rows] int64, the packed tokens whose hidden states are wanted; None is all.

        Returns:
            [rows, hidden] after the last norm: what the head takes, and what embeddings are read from.
        """
        assert len(groups) == len(self.pools.groups), "one step a layer group"
        model = self.model
        for backend, group in zip(self.backends, groups):
            if isinstance(group, AttentionStep):
                backend.plan(group)
        positions = groups[0].positions
        step = ForwardStep(positions, model.ropes(positions))
        partial, residual = None, model.embed(ids)
        for index, layer in enumerate(model.layers):
            mixer_input, residual = layer.before(partial, residual, step)
            partial, residual = layer.after(layer.mix(mixer_input, self._mixer(index, groups)), residual)
        if rows is not None:
            partial, residual = None if partial is None else partial[rows], residual[rows]
        return model.final(partial, residual).data

    def _mixer(self, index: int, groups: Sequence[GroupStep]) -> Any:
        """What the layer mixes tokens with: a `Mixer`, the `LiveState` of a recurrent one, or nothing."""
        group = self._group_of.get(index)
        if group is None:
            return None
        step = groups[group]
        if isinstance(step, StateStep):
            return LiveState(self.states[index], step)
        stated = self.model.layers[index].spec
        assert stated is not None
        spec: CacheSpec = self.reach.of(index, stated)
        return BoundAttention(self.backends[group], self.pools.layer(index), step, spec)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] as `forward` returned it -> logits [rows, vocab], the same on every rank"""
        return self.model.head(Act(hidden))
