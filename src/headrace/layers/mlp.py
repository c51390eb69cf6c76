"""The gated MLP: down(activation(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.act_mul import Activation
from headrace.kernels.act_mul_quantise import act_mul_quantise
from headrace.layers.linear import Linear
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
        raise ValueError(f"config.json: unknown activation {name!r}: known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Mlp:
    """Its result is a partial sum."""

    def __init__(self, gate_up: Linear, down: Linear, *, kind: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.kind: Activation = kind

    def __call__(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], partial"""
        return self.down(act_mul_quantise(self.gate_up(act), self.kind, form=self.down.wanted))
