"""What recurrent layers share: the short convolution's weight, small weights by head, and the decoder layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.layers.experts import Experts
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp, PlainMlp
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, LiveState, StateSpec
from headrace.layers.weights import Init, Parameter, Slot

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SmallWeights:
    """Weights of a recurrent layer that no product takes: `{name}.{part}`, plain in every checkpoint."""

    def __init__(
        self,
        name: str,
        parts: Mapping[str, Sequence[Slot]],
        *,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        init: Init = "normal",
    ) -> None:
        self._parameters = {
            part: Parameter(f"{name}.{part}", slots, dtype=dtypes[part], device=device, init=init)
            for part, slots in parts.items()
        }
        self._loaded: dict[str, Tensor] = {}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(self._parameters.values())

    def finish(self) -> None:
        self._loaded = {part: parameter.take() for part, parameter in self._parameters.items()}

    def __getitem__(self, part: str) -> Tensor:
        assert self._loaded, "the weights are not loaded"
        return self._loaded[part]


class RecurrentMixer(Protocol):
    """A recurrent block without its norm."""

    @property
    def state(self) -> StateSpec: ...

    def feed_from(self, norm: Norm) -> None:
        """Say what the norm before the block is to yield."""
        ...

    def project(self, act: Act) -> Any:
        """[tokens, hidden] -> what `mix` takes"""
        ...

    def mix(self, projected: Any, live: LiveState) -> Act:
        """The scan, over the rows' states. -> what `output` takes"""
        ...

    def output(self, mixed: Act) -> Tensor:
        """-> [tokens, hidden], partial"""
        ...


class RecurrentPreNormLayer:
    """x + recurrent(norm(x)), then x + mlp(norm(x))."""

    spec = None

    def __init__(
        self, *, input_norm: Norm, mixer: RecurrentMixer, mlp_norm: Norm, mlp: Mlp | PlainMlp | Experts
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.state = mixer.state
        mixer.feed_from(input_norm)
        mlp.feed_from(mlp_norm)

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        act, residual = self.input_norm(partial, residual)
        return self.mixer.project(act), residual

    def mix(self, mixer_input: Any, mixer: LiveState) -> Act:
        return self.mixer.mix(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        act, residual = self.mlp_norm(self.mixer.output(mixed), residual)
        return self.mlp(act), residual


def state_dtype(factory: LayerFactory, config: HfConfig) -> torch.dtype:
    """Of recurrent states: the engine's choice, what the config states, or that of the model."""
    if factory.state_dtype is not None:
        return factory.state_dtype
    stated = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
    if stated is None:
        return factory.dtype
    found = vars(torch).get(str(stated).removeprefix("torch."))
    if found not in STATE_DTYPES:
        raise ValueError(f"{config.place}: mamba_ssm_cache_dtype {stated!r} is not float32, float16 or bfloat16")
    return found
