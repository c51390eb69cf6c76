"""The runner: owns the loop over a model's layers, and ties each layer to its cache and its group's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, AttentionStep, CacheSpec, PartedSpec
from headrace.engine.backends import Backends
from headrace.engine.groups import WHOLE, Reach, shared_layers
from headrace.engine.pools import KvPools
from headrace.kernels.quantise import Form
from headrace.layers.port import Act, ForwardStep, LiveState, Model, RecurrentLayer, StateStep

GroupStep = AttentionStep | StateStep
NO_STATES: Mapping[int, tuple[Tensor, ...]] = {}


@dataclass(slots=True)
class BoundAttention:
    """Attention over one layer's cache in one step: the mixer that the runner hands to a layer."""

    backend: AttentionBackend
    cache: Any
    step: Any
    """`AttentionStep`; of a `PartedSpec` a tuple with that of each part."""
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
        self._groups_of: dict[int, list[int]] = {}
        for index, group in enumerate(pools.groups):
            for layer in group.layers:
                self._groups_of.setdefault(layer, []).append(index)
        self._parted = {
            index
            for index, layer in enumerate(model.layers)
            if not isinstance(layer, RecurrentLayer) and isinstance(layer.spec, PartedSpec)
        }
        assert pools.num_layers + len(states) == len(self._groups_of), (pools.num_layers, len(states))
        self._sources = shared_layers(model.layers)
        self._groups_of.update({layer: self._groups_of[source] for layer, source in self._sources.items()})

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
        step = ForwardStep(positions, model.ropes(positions), ids)
        partial, residual = None, model.embed(ids)
        for index, layer in enumerate(model.layers):
            mixer_input, residual = layer.before(partial, residual, step)
            partial, residual = layer.after(layer.mix(mixer_input, self._mixer(index, groups)), residual)
        if rows is not None:
            partial, residual = None if partial is None else partial[rows], residual[rows]
        return model.final(partial, residual).data

    def wants_lengths(self, context_rows: Sequence[tuple[int, int]]) -> bool:
        """Whether a step with these prompts is slow as a graph, which knows no lengths on the host: in all layers that
        attend. The first layer of a group speaks for it. context_rows: as `AttentionStep` has it."""
        asked = [
            backend.wants_lengths(context_rows, self._spec(group.layers[0]))
            for backend, group in zip(self.backends, self.pools.groups)
            if not group.is_recurrent
        ]
        return bool(asked) and all(asked)

    def _spec(self, index: int) -> CacheSpec:
        """Of a layer that attends, as it does."""
        stated = self.model.layers[index].spec
        assert stated is not None
        return self.reach.of(self._sources.get(index, index), stated)

    def _mixer(self, index: int, groups: Sequence[GroupStep]) -> Any:
        """What the layer mixes tokens with: a `Mixer`, the `LiveState` of a recurrent one, or nothing."""
        own = self._groups_of.get(index)
        if own is None:
            return None
        first = groups[own[0]]
        if isinstance(first, StateStep):
            return LiveState(self.states[index], first)
        kept_by = self._sources.get(index, index)
        steps = tuple(step for group in own if isinstance(step := groups[group], AttentionStep))
        step = steps if index in self._parted else first
        return BoundAttention(self.backends[own[0]], self.pools.layer(kept_by), step, self._spec(index))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] as `forward` returned it -> logits [rows, vocab], the same on every rank"""
        return self.model.head(Act(hidden))
