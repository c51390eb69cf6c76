"""The port of the quant room: how a weight is stored and multiplied.

A recipe says which tensors a checkpoint holds for a linear's weight (`stored`). The layer hands them over once (`load`,
or `prepare` for a plain weight), drops its own references, and multiplies with what it got back. What a prepared weight
is inside is the recipe's secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headrace.kernels.act_mul import Activation
from headrace.kernels.moe.port import Stacked
from headrace.kernels.quantise import Form, Quantised


class ActLike(Protocol):
    """Activations and, where the recipe quantises them, their scales (the layers room's `Act`)."""

    @property
    def data(self) -> Tensor: ...  # [tokens, in]
    @property
    def scales(self) -> Tensor | None: ...


class PreparedWeight(Protocol):
    """One weight, ready to be multiplied."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def size_bytes(self) -> int:
        """Memory it holds, the bias included."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint for a weight [out, in], each of whose entries stands for a block of the weight's."""

    name: str
    """Its last name: `weight`, `weight_scale`."""
    dtype: torch.dtype
    rows: int | None = 1
    """The block's height; None is everything, and the tensor [1]."""
    columns: int | None = 1
    """The block's width; None is everything, and the tensor [..., 1]."""
    inner: tuple[int, ...] = ()
    """Dimensions of one entry: the bytes that hold a block's codes."""
    is_scale: bool = False
    """Whether its entries are what codes are multiplied with, as exponents."""
    becomes_fp8: bool = False
    """Whether it is in FP8 with a scale for each output once it's loaded."""


@runtime_checkable
class ExpertsRecipe(Protocol):
    """One way to store the weights of experts, stacked by expert. Stateless; a recipe of linears may be one too."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The tensors of one expert's weight, as of a linear's."""
        ...

    def stack(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> Stacked:
        """One product's weights of all experts.

        Args:
            tensors: by the name in `stored`, with the experts as first dimension; as of a linear else.
            bias: [experts, out].
            widths: outputs of each weight that is fused; [1] tensors have an entry for each: [experts, fused].
            dtype: of the model's plain weights.
        """
        ...


class Recipe(Protocol):
    """One way to store and multiply a linear layer's weight. Stateless."""

    def stored(self, dtype: torch.dtype) -> tuple[Stored, ...]:
        """The tensors, the bias not among them. dtype: of the model's plain weights."""
        ...

    def load(
        self, tensors: Mapping[str, Tensor], bias: Tensor | None, *, widths: Sequence[int], dtype: torch.dtype
    ) -> PreparedWeight:
        """A weight from its stored tensors.

        Args:
            tensors: by the name in `stored`. Weights that are fused into one lie one below the other.
            widths: outputs of each of those; [1] tensors have an entry for each.
            dtype: of what `linear` and `rows` return.
        """
        ...

    def wanted(self, prepared: PreparedWeight) -> Form:
        """The form of activations that `linear` takes without work of its own. It takes plain ones too."""
        ...

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedWeight:
        """weight: [out, in]; bias: [out]. The result holds no reference to a weight that it packed."""
        ...

    def linear(self, act: ActLike, prepared: PreparedWeight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, in] -> [tokens, out], in the activations' dtype unless `out_dtype` is given."""
        ...

    def rows(self, prepared: PreparedWeight, ids: Tensor) -> Tensor:
        """Rows of the weight: ids [n] int64 -> [n, in] in the dtype that `prepare` was given.

        What an embedding whose table is also the head's weight reads, so that the table is held once.
        """
        ...


@runtime_checkable
class GatedRecipe(Protocol):
    """A recipe of linears that knows the first half of a gated MLP as one operation."""

    def gated(self, act: ActLike, prepared: PreparedWeight, kind: Activation, *, form: Form) -> Quantised:
        """[tokens, in] times a weight [2 * features, in], gates first; then activation(gate) * up in `form`."""
        ...
