"""The port of the quant room: how a weight is stored and multiplied.

A layer hands each checkpoint weight to its recipe once (`prepare`), drops its own reference, and multiplies with
what it got back. What a prepared weight is inside is the recipe's secret.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


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


class Recipe(Protocol):
    """One way to store and multiply a linear layer's weight. Stateless."""

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
