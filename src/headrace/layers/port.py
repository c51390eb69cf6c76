"""The port between models and the engine's runner.

The runner owns the loop over layers; a layer is `before` / `mix` / `after`. Between layers travel a
residual and a partial sum: what a norm owes to its consumers (tensor-parallel reduction, residual
add, normalisation, later quantisation) happens in one place, `norm(partial, residual) -> Act, residual`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from headrace.attention.port import AttentionSpec

if TYPE_CHECKING:
    from headrace.layers.weights import WeightMap


class Act(NamedTuple):
    """Activations as a linear takes them: the data, and its scales when a recipe quantised it."""

    data: Tensor  # [tokens, features]
    scales: Tensor | None = None


class Rope(NamedTuple):
    """cos and sin of this step's positions, for one kind of layer."""

    cos: Tensor  # [tokens, rotary_dim / 2]
    sin: Tensor


@dataclass(slots=True)
class ForwardStep:
    """What layers read of a step: positions, and cos/sin by rope kind (filled by the runner once a step)."""

    positions: Tensor  # [tokens] int64
    ropes: dict[str, Rope]


class Mixer(Protocol):
    """`mix` is handed in by the runner: attention over this layer's cache and group, already bound."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Layer(Protocol):
    """One decoder layer."""

    spec: AttentionSpec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        """Norm, projections, rope. -> (mixer input: (q, k, v) of [tokens, heads, dim], residual)."""
        ...

    def mix(self, mixer_input: Any, mixer: Mixer) -> Tensor:
        """-> [tokens, heads * dim]"""
        ...

    def after(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """Output projection, norm, MLP. -> (partial sum, residual)"""
        ...


class Model(Protocol):
    """One architecture: embedding, layers, head. Knows nothing of batching, ranks, kernels or quantisation."""

    layers: list[Layer]
    vocab_size: int
    max_position: int

    def weight_map(self) -> WeightMap:
        """Checkpoint names -> parameters, fused slots and shard rules."""
        ...

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        """cos and sin for every rope kind of this model, once a step. positions: [tokens] int64."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]"""
        ...

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        """The last norm: what the head takes. Also what embeddings are read from."""
        ...

    def head(self, hidden: Act) -> Tensor:
        """[rows, hidden] -> float32 logits [rows, vocab]; gathered over ranks, caps applied."""
        ...
