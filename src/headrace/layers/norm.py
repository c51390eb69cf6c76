"""Norms between layers, and all that they owe: the tensor-parallel sum, the residual add, the normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.rms_norm import rms_norm
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act
from headrace.layers.weights import Parameter, Slot


class Scale:
    """The weight of an RMS norm."""

    def __init__(
        self, name: str, features: int, *, eps: float, plus_one: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.eps = eps
        self.plus_one = plus_one
        init = "zero" if plus_one else "one"
        self._weight = Parameter(f"{name}.weight", [Slot("", (features,))], dtype=dtype, device=device, init=init)
        self._loaded: Tensor | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._weight,)

    def finish(self) -> None:
        self._loaded = self._weight.take()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., features] -> the same, normalised"""
        normed = rms_norm(x, self._ready(), self.eps, plus_one=self.plus_one)
        assert isinstance(normed, Tensor)
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """-> (normalised x + residual, x + residual)"""
        both = rms_norm(x, self._ready(), self.eps, residual=residual, plus_one=self.plus_one)
        assert isinstance(both, tuple)
        return both

    def _ready(self) -> Tensor:
        assert self._loaded is not None, f"{self.name} is not loaded"
        return self._loaded


class Norm:
    """An RMS norm over the hidden state."""

    def __init__(self, scale: Scale, *, parallel: ParallelContext) -> None:
        self.scale = scale
        self.parallel = parallel

    def __call__(self, partial: Tensor | None, residual: Tensor) -> tuple[Act, Tensor]:
        """Normalise residual + sum of partial over ranks. -> (what linears take, the new residual)

        Args:
            partial: [tokens, hidden], or None when nothing is owed to the residual.
            residual: [tokens, hidden].
        """
        if partial is None:
            return Act(self.scale(residual)), residual
        normed, residual = self.scale.add(self.parallel.collectives.all_reduce(partial), residual)
        return Act(normed), residual

    def settle(self, partial: Tensor, residual: Tensor) -> Tensor:
        """Normalise the sum of partial over ranks and add it to the residual: a norm after a block (Gemma)."""
        return residual + self.scale(self.parallel.collectives.all_reduce(partial))


class HeadNorm:
    """An RMS norm over each head's features, as on queries and keys. The same on all ranks."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads, dim] -> the same"""
        return self.scale(x.reshape(-1, x.shape[-1])).view(x.shape)
