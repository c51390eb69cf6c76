"""Attention over residuals (Kimi Team 2026, Attention Residuals): the layers of a model come in stretches, and what a
block sees is a mix of the sums that earlier stretches left and of the one that grows now.

Between layers travel the sums of a token, [tokens, places, hidden]: place 0 is the one that grows, the others are those
that stretches began with, in order. They are written in place: no one else holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.depth_mix import depth_mix
from headrace.layers.attention import AttentionBlock
from headrace.layers.experts import Experts
from headrace.layers.factory import LayerFactory
from headrace.layers.mlp import Mlp
from headrace.layers.norm import Norm
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act, ForwardStep, LiveState, Mixer, StateSpec
from headrace.layers.recurrent import RecurrentMixer
from headrace.layers.weights import Parameter, Slot

DEPTH_RULES: Mapping[str, str] = {
    f"model.{stored}_res_{kind}.weight": f"{place}.{kind}"
    for stored, place in (
        ("layers.*.self_attention", "layers.*.mix_depths"),
        ("layers.*.mlp", "layers.*.mlp_depths"),
        ("output_attn", "depths"),
    )
    for kind in ("norm", "proj")
}
"""The names that Kimi-K3's checkpoints use."""


class Depth(NamedTuple):
    """Where a layer stands."""

    num_left: int
    """Sums that earlier stretches began with."""
    opens: bool
    """It is the first of a stretch."""

    @classmethod
    def of(cls, layer: int, stretch: int) -> Depth:
        return cls(-(-layer // stretch), layer % stretch == 0)


class DepthMix:
    """The weights of one mix: parameters `{name}.norm` [hidden] and `{name}.proj` [1, hidden]."""

    def __init__(self, name: str, features: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self.eps = eps
        self._norm = Parameter(f"{name}.norm", [Slot("", (features,))], dtype=dtype, device=device, init="one")
        self._proj = Parameter(f"{name}.proj", [Slot("", (1, features))], dtype=dtype, device=device)
        self._weight: Tensor | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._norm, self._proj)

    def finish(self) -> None:
        self._weight = self._norm.take().float() * self._proj.take()[0].float()

    def __call__(self, sums: Tensor, count: int, added: Tensor | None = None, *, replaces: bool = False) -> Tensor:
        """As `kernels.depth_mix`. [tokens, places, hidden] -> [tokens, hidden]"""
        assert self._weight is not None, f"{self.name} is not loaded"
        return depth_mix(sums, self._weight, self.eps, count=count, added=added, replaces=replaces)


class _DepthBase:
    """What both kinds of layers do but mixing tokens."""

    def __init__(
        self,
        *,
        depth: Depth,
        mix_depths: DepthMix,
        input_norm: Norm,
        mlp_depths: DepthMix,
        mlp_norm: Norm,
        mlp: Mlp | Experts,
        parallel: ParallelContext,
    ) -> None:
        self.depth = depth
        self.mix_depths = mix_depths
        self.input_norm = input_norm
        self.mlp_depths = mlp_depths
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.parallel = parallel
        mlp.feed_from(mlp_norm)

    def open(self, partial: Tensor | None, sums: Tensor) -> Act:
        """-> what the first block takes"""
        num_left, opens = self.depth
        owed = None if partial is None else self.parallel.collectives.all_reduce(partial)
        if num_left:
            seen = self.mix_depths(sums, num_left + 1, owed)
        else:
            assert owed is None, "the first layer is owed nothing"
            seen = sums[:, 0].contiguous()
        if opens:
            sums[:, num_left + 1] = sums[:, 0]
        return self.input_norm(None, seen)[0]

    def close(self, partial: Tensor, sums: Tensor) -> Tensor:
        """partial: of the first block. -> of the MLP"""
        num_left, opens = self.depth
        owed = self.parallel.collectives.all_reduce(partial)
        seen = self.mlp_depths(sums, num_left + opens + 1, owed, replaces=opens)
        return self.mlp(self.mlp_norm(None, seen)[0])


class DepthLayer(_DepthBase):
    """A decoder layer with attention. Keywords as of its base."""

    def __init__(self, attention: AttentionBlock, **parts: Any) -> None:
        super().__init__(**parts)
        self.attention = attention
        attention.feed_from(self.input_norm)

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        return self.attention.project(self.open(partial, residual), step), residual

    def mix(self, mixer_input: Any, mixer: Mixer) -> Act:
        return self.attention.attend(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.close(self.attention.output(mixed), residual), residual


class DepthRecurrentLayer(_DepthBase):
    """A decoder layer with a state. Keywords as of its base."""

    spec = None
    state: StateSpec

    def __init__(self, mixer: RecurrentMixer, **parts: Any) -> None:
        super().__init__(**parts)
        self.mixer = mixer
        self.state = mixer.state
        mixer.feed_from(self.input_norm)

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        return self.mixer.project(self.open(partial, residual)), residual

    def mix(self, mixer_input: Any, mixer: LiveState) -> Act:
        return self.mixer.mix(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.close(self.mixer.output(mixed), residual), residual


def deepened(hidden: Tensor, num_stretches: int) -> Tensor:
    """[tokens, hidden] -> [tokens, stretches + 1, hidden], the sums before the first layer"""
    sums = hidden.new_empty(hidden.shape[0], num_stretches + 1, hidden.shape[1])
    sums[:, 0] = hidden
    return sums


def depth_mix_of(factory: LayerFactory, name: str, features: int, *, eps: float) -> DepthMix:
    mix = DepthMix(name, features, eps=eps, dtype=factory.dtype, device=factory.device)
    factory.modules.append(mix)
    return mix
