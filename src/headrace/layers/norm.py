"""Norms between layers, and all that they owe: the tensor-parallel sum, the residual add, the normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.norm_quantise import norm_quantise
from headrace.kernels.quantise import PLAIN, Form, quantise
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope_write import HeadScale
from headrace.layers.linear import Linear
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act
from headrace.layers.weights import Parameter, Part, Slot


class Scale:
    """The weight of an RMS norm."""

    def __init__(
        self,
        name: str,
        features: int,
        *,
        eps: float,
        plus_one: bool,
        dtype: torch.dtype,
        device: torch.device,
        share: tuple[int, int] | None = None,
    ) -> None:
        """
        Args:
            share: [start, stop) of the features that this rank holds; None is all.
        """
        self.name = name
        self.eps = eps
        self.plus_one = plus_one
        init = "zero" if plus_one else "one"
        slot = Slot("", (features,), None if share is None else Part(0, *share))
        self._weight = Parameter(f"{name}.weight", [slot], dtype=dtype, device=device, init=init)
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

    def quantised(self, x: Tensor, *, form: Form, residual: Tensor | None = None) -> tuple[Act, Tensor | None]:
        """-> (normalised x + residual in the form asked for, x + residual)"""
        return norm_quantise(x, self._ready(), self.eps, form=form, residual=residual, plus_one=self.plus_one)

    def ready(self) -> HeadScale:
        """What a kernel that norms heads takes."""
        return HeadScale(self._ready(), self.eps, self.plus_one)

    def _ready(self) -> Tensor:
        assert self._loaded is not None, f"{self.name} is not loaded"
        return self._loaded


class CentredScale:
    """Weight, and bias where there is one, of a layer norm (Ba et al. 2016): the mean is taken off first.

    A norm of another kind derives from it and overrides `__call__`.
    """

    def __init__(
        self,
        name: str,
        features: int,
        *,
        eps: float,
        bias: bool,
        plus_one: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.eps = eps
        self.plus_one = plus_one
        init = "zero" if plus_one else "one"
        slots = [Slot("", (features,))]
        self._weight = Parameter(f"{name}.weight", slots, dtype=dtype, device=device, init=init)
        self._bias = Parameter(f"{name}.bias", slots, dtype=dtype, device=device, init="zero") if bias else None
        self._loaded: tuple[Tensor, Tensor | None] | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._weight,) if self._bias is None else (self._weight, self._bias)

    def finish(self) -> None:
        weight = self._weight.take().float()
        bias = None if self._bias is None else self._bias.take().float()
        self._loaded = (weight + 1 if self.plus_one else weight, bias)

    @property
    def loaded(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, [features] float32 each; with `plus_one` the one is added."""
        assert self._loaded is not None, f"{self.name} is not loaded"
        return self._loaded

    def __call__(self, x: Tensor) -> Tensor:
        """[..., features] -> the same, normalised in float32"""
        weight, bias = self.loaded
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)

    def quantised(self, x: Tensor, *, form: Form, residual: Tensor | None = None) -> tuple[Act, Tensor | None]:
        """-> (normalised x + residual in the form asked for, x + residual)"""
        summed = x if residual is None else x + residual
        return quantise(self(summed), form), None if residual is None else summed


class Factor:
    """A number that a layer's result is multiplied with: `{name}.weight`."""

    def __init__(self, name: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = Parameter(f"{name}.weight", [Slot("", (1,))], dtype=dtype, device=device, init="one")
        self._loaded: Tensor | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._weight,)

    def finish(self) -> None:
        self._loaded = self._weight.take()

    def __call__(self, x: Tensor) -> Tensor:
        assert self._loaded is not None, f"{self._weight.name} is not loaded"
        return x * self._loaded


class Norm:
    """A norm over the hidden state, in the form that the linear behind it takes."""

    def __init__(self, scale: Scale | CentredScale, *, parallel: ParallelContext) -> None:
        self.scale = scale
        self.parallel = parallel
        self._consumer: Linear | None = None

    def feed(self, consumer: Linear) -> None:
        """Say which linear takes this norm's result, and alone takes it."""
        self._consumer = consumer

    def __call__(self, partial: Tensor | None, residual: Tensor) -> tuple[Act, Tensor]:
        """Normalise residual + sum of partial over ranks. -> (what the consumer takes, the new residual)

        Args:
            partial: [tokens, hidden], or None when nothing is owed to the residual.
            residual: [tokens, hidden].
        """
        form = PLAIN if self._consumer is None else self._consumer.wanted
        if partial is None:
            return self.scale.quantised(residual, form=form)[0], residual
        reduced = self.parallel.collectives.all_reduce(partial)
        act, summed = self.scale.quantised(reduced, form=form, residual=residual)
        assert summed is not None
        return act, summed

    def settle(self, partial: Tensor, residual: Tensor) -> Tensor:
        """Normalise the sum of partial over ranks and add it to the residual: a norm after a block (Gemma)."""
        return residual + self.reduced(partial)

    def reduced(self, partial: Tensor) -> Tensor:
        """The sum of partial over ranks, normalised."""
        return self.scale(self.parallel.collectives.all_reduce(partial))


class HeadNorm:
    """An RMS norm over each head's features, as on queries and keys. The same on all ranks."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads, dim] -> the same"""
        return self.scale(x.reshape(-1, x.shape[-1])).view(x.shape)

    def ready(self) -> HeadScale:
        return self.scale.ready()
