"""The port between models and the engine's runner.

The runner owns the loop over layers; a layer is `before` / `mix` / `after`. Between layers travel a
residual and a partial sum: what a norm owes to its consumers (tensor-parallel reduction, residual
add, normalisation, quantisation) happens in one place, `norm(partial, residual) -> Act, residual`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from headrace.attention.port import AttentionSpec as AttentionSpec  # models build theirs from here
from headrace.attention.port import CacheSpec
from headrace.kernels.quantise import PLAIN as PLAIN
from headrace.kernels.quantise import Form, Quantised
from headrace.kernels.rope_write import Projected as Projected

if TYPE_CHECKING:
    from headrace.layers.weights import WeightMap


Act = Quantised
"""Activations as a linear takes them: `data` [tokens, features], and its `scales` when a recipe quantised it."""


class Rope(NamedTuple):
    """cos and sin of this step's positions, for one kind of layer."""

    cos: Tensor  # [tokens, rotary_dim / 2]
    sin: Tensor


@dataclass(slots=True)
class ForwardStep:
    """What layers read of a step: positions, cos/sin by rope kind (filled by the runner once a step), token ids."""

    positions: Tensor  # [tokens] int64
    ropes: dict[str, Rope]
    ids: Tensor  # [tokens] int64
    carried: dict[str, Any] = field(default_factory=dict[str, Any])
    """What layers hand on to later ones in this step."""


class Mixer(Protocol):
    """`mix` is handed in by the runner: attention over this layer's cache and group, already bound."""

    def __call__(self, mixer_input: Any, form: Form) -> Act:
        """What the layer's kind of attention takes (`Projected` for heads) -> [tokens, heads * dim] in that form"""
        ...


class Layer(Protocol):
    """One decoder layer."""

    @property
    def spec(self) -> CacheSpec | None:
        """Final once the weights are loaded. None: it keeps nothing by token, being a `RecurrentLayer`, or one that
        mixes no tokens and gets no mixer."""
        ...

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        """Norm and projections. -> (what `mix` takes, residual)"""
        ...

    def mix(self, mixer_input: Any, mixer: Any) -> Any:
        """
        Args:
            mixer: a `Mixer`; of a recurrent layer its `LiveState`.

        Returns:
            What `after` takes: [tokens, heads * dim] and what else the layer carries there.
        """
        ...

    def after(self, mixed: Any, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """Output projection, norm, MLP. -> (partial sum, residual)"""
        ...


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of one sequence, on this rank: tensors that are zero before the first token."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(slots=True)
class StateStep:
    """The packed rows of one step, for recurrent layers."""

    slots: Tensor
    """[rows] int64, each row's place in the states. A row of a sequence that has ended has one that nobody reads."""
    query_starts: Tensor  # [rows + 1] int32, offsets of the rows in the packed tokens
    positions: Tensor  # [tokens] int64
    max_query: int
    num_context_rows: int
    context_starts: tuple[int, ...]
    """[num_context_rows + 1] of `query_starts`, on the host. The rows behind them have one token each."""


@dataclass(slots=True)
class LiveState:
    """One recurrent layer's states of all slots in one step: the mixer that the runner hands to it."""

    tensors: tuple[Tensor, ...]
    """[slots, *shape] each, strided. The layer reads the rows' slots and writes back the states after their tokens."""
    step: StateStep


@runtime_checkable
class RecurrentLayer(Protocol):
    """A decoder layer that keeps a state by sequence instead of K and V by token; else as `Layer`."""

    state: StateSpec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]: ...

    def mix(self, mixer_input: Any, mixer: LiveState) -> Any: ...

    def after(self, mixed: Any, residual: Tensor) -> tuple[Tensor | None, Tensor]: ...


class Model(Protocol):
    """One architecture: embedding, layers, head. Knows nothing of batching, ranks, kernels or quantisation."""

    layers: list[Layer]
    vocab_size: int
    max_position: int

    @property
    def is_capturable(self) -> bool:
        """Whether its steps may run as CUDA graphs."""
        ...

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        ...

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
        """[rows, hidden] -> logits [rows, vocab]; over all ranks, caps applied. Float32, on a GPU maybe narrower."""
        ...
