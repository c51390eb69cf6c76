"""Layers of one part, x + part(norm(x)): attention, a recurrent block or an MLP (Nemotron-H)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.layers.attention import AttentionBlock
from headrace.layers.experts import Experts
from headrace.layers.mlp import Mlp, PlainMlp
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, LiveState, Mixer
from headrace.layers.recurrent import RecurrentMixer


class AttentionLayer:
    """x + attention(norm(x))."""

    def __init__(self, *, norm: Norm, attention: AttentionBlock) -> None:
        self.norm = norm
        self.attention = attention
        attention.feed_from(norm)

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        act, residual = self.norm(partial, residual)
        return self.attention.project(act, step), residual

    def mix(self, mixer_input: Any, mixer: Mixer) -> Act:
        return self.attention.attend(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.output(mixed), residual


class StateLayer:
    """x + recurrent(norm(x))."""

    spec = None

    def __init__(self, *, norm: Norm, mixer: RecurrentMixer) -> None:
        self.norm = norm
        self.mixer = mixer
        self.state = mixer.state
        mixer.feed_from(norm)

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        act, residual = self.norm(partial, residual)
        return self.mixer.project(act), residual

    def mix(self, mixer_input: Any, mixer: LiveState) -> Act:
        return self.mixer.mix(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.mixer.output(mixed), residual


class MlpLayer:
    """x + mlp(norm(x)): it mixes no tokens and keeps nothing of them."""

    spec = None

    def __init__(self, *, norm: Norm, mlp: Mlp | PlainMlp | Experts) -> None:
        self.norm = norm
        self.mlp = mlp
        mlp.feed_from(norm)

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Act, Tensor]:
        return self.norm(partial, residual)

    def mix(self, mixer_input: Act, mixer: Any) -> Act:
        return mixer_input

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.mlp(mixed), residual
