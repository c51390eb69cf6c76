"""MLPs. Gated: down(activation(gate(x)) * up(x)), gate and up in one product; plain: down(activation(up(x)))."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.act_mul import Activation
from headrace.kernels.act_mul_quantise import act_mul_quantise
from headrace.kernels.moe._twin import activate
from headrace.kernels.moe.port import ExpertAct
from headrace.kernels.quantise import quantise
from headrace.layers.hf_config import HfConfig
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.layers.port import Act

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
}
"""A config's name -> the kernel's."""


def activation(name: str) -> Activation:
    """
    Raises:
        ValueError: no kernel for the activation that the config names.
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: unknown activation {name!r} (hidden_act, or the like): known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""Of an MLP without a gate."""


def plain_activation(name: str) -> Callable[[Tensor], Tensor]:
    """
    Raises:
        ValueError: an activation that is not known.
    """
    if name not in PLAIN_ACTIVATIONS:
        raise ValueError(
            f"config.json: unknown activation {name!r} (hidden_act, or the like): known are"
            f" {', '.join(PLAIN_ACTIVATIONS)}"
        )
    return PLAIN_ACTIVATIONS[name]


class PlainMlp:
    """Without a gate. Its result is a partial sum."""

    def __init__(self, up: Linear, down: Linear, *, act: Callable[[Tensor], Tensor]) -> None:
        self.up = up
        self.down = down
        self.act = act

    def feed_from(self, norm: Norm) -> None:
        """As `Mlp.feed_from`."""
        norm.feed(self.up)

    def __call__(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], partial"""
        return self.down(quantise(self.act(self.up(act)), self.down.wanted))


class Mlp:
    """Its result is a partial sum."""

    def __init__(self, gate_up: Linear, down: Linear, *, kind: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.kind: Activation = kind

    def feed_from(self, norm: Norm) -> None:
        """The norm's result goes to the first product, and nowhere else."""
        norm.feed(self.gate_up)

    def __call__(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], partial"""
        return self.down(self.gate_up.gated(act, self.kind, form=self.down.wanted))


class FactorMlp(Mlp):
    """A gated MLP whose gate and result are multiplied with constants (Falcon-H1)."""

    def __init__(self, gate_up: Linear, down: Linear, *, kind: Activation, factors: tuple[float, float]) -> None:
        super().__init__(gate_up, down, kind=kind)
        self.factors = factors

    def __call__(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], partial"""
        both = self.gate_up(act)
        both[:, : both.shape[1] // 2] *= self.factors[0]
        return self.down(act_mul_quantise(both, self.kind, form=self.down.wanted)) * self.factors[1]


class ClampedMlp(Mlp):
    """A gated MLP with what experts may have between their products: clamped, scaled (gpt-oss, MiniMax-M3)."""

    def __init__(self, gate_up: Linear, down: Linear, *, act: ExpertAct) -> None:
        super().__init__(gate_up, down, kind="silu")
        self.act = act

    def __call__(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], partial"""
        return self.down(quantise(activate(self.gate_up(act), self.act), self.down.wanted))


def is_dense(config: HfConfig, layer: int, *, first: int) -> bool:
    """Whether a layer has an MLP in place of experts: as `mlp_layer_types` lists it, else the `first` ones have."""
    kinds = config.kinds("mlp_layer_types", ("dense", "sparse"))
    return layer < first if kinds is None else kinds[layer] == "dense"
