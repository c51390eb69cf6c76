"""An embedding of tokens for each layer, which it adds to the hidden state (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.act_mul import Activation, act_mul
from headrace.layers.embedding import Embedding
from headrace.layers.factory import LayerFactory
from headrace.layers.linear import Linear
from headrace.layers.mlp import activation
from headrace.layers.norm import HeadNorm, Norm
from headrace.layers.port import Act, ForwardStep

PER_LAYER_RULES = {
    "model.embed_tokens_per_layer.weight": "inputs.embed.weight",
    "model.per_layer_model_projection.*": "inputs.projection.*",
    "model.per_layer_projection_norm.weight": "inputs.norm.weight",
    "model.layers.*.per_layer_input_gate.*": "layers.*.own.gate.*",
    "model.layers.*.per_layer_projection.*": "layers.*.own.projection.*",
    "model.layers.*.post_per_layer_input_norm.weight": "layers.*.own.norm.weight",
}

CARRIED = "layer inputs"


class LayerInputs:
    """Of all layers: a table's rows beside a projection of the usual embedding."""

    def __init__(self, embedding: Embedding, projection: Linear, norm: HeadNorm, *, features: int) -> None:
        self.embedding = embedding
        self.projection = projection
        self.norm = norm
        self.features = features

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """ids: [tokens], embedded: [tokens, hidden] -> [tokens, layers, features]"""
        shape = (-1, self.features)
        own = self.embedding(ids).unflatten(-1, shape) * self.features**0.5
        seen = self.projection(Act(embedded)) * embedded.shape[-1] ** -0.5
        return (self.norm(seen.unflatten(-1, shape)) + own) * 2**-0.5


class LayerInput:
    """One layer's part: norm(projection(act(gate(x)) * its embedding)), added to x."""

    def __init__(
        self, inputs: LayerInputs, layer: int, *, gate: Linear, projection: Linear, norm: Norm, act: str
    ) -> None:
        self.inputs = inputs
        self.layer = layer
        self.gate = gate
        self.projection = projection
        self.norm = norm
        self.kind: Activation = activation(act)

    def find(self, step: ForwardStep, residual: Tensor) -> Tensor:
        """residual: of the first layer, the embedding of the tokens. -> [tokens, features]"""
        if self.layer == 0:
            step.carried[CARRIED] = self.inputs(step.ids, residual)
        return step.carried[CARRIED][:, self.layer]

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        """[tokens, hidden] -> the same; every rank computes all of it"""
        gated = act_mul(torch.cat((self.gate(Act(x)), own), -1), self.kind)
        return x + self.norm.scale(self.projection(Act(gated)))


def layer_inputs(
    factory: LayerFactory, *, vocab_size: int, hidden_size: int, num_layers: int, features: int, eps: float
) -> LayerInputs:
    """Modules `inputs.embed`, `inputs.projection` and `inputs.norm`."""
    return LayerInputs(
        factory.embedding("inputs.embed", vocab_size, num_layers * features),
        factory.linear("inputs.projection", hidden_size, num_layers * features),
        factory.head_norm("inputs.norm", features, eps=eps),
        features=features,
    )


def layer_input(
    factory: LayerFactory, name: str, inputs: LayerInputs, *, layer: int, hidden_size: int, act: str, eps: float
) -> LayerInput:
    """Modules `{name}.gate`, `{name}.projection` and `{name}.norm`."""
    return LayerInput(
        inputs,
        layer,
        gate=factory.linear(f"{name}.gate", hidden_size, inputs.features),
        projection=factory.linear(f"{name}.projection", inputs.features, hidden_size),
        norm=factory.norm(f"{name}.norm", hidden_size, eps=eps),
        act=act,
    )
