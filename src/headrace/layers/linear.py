"""Linear layers: which part of a checkpoint weight a rank keeps, and the recipe that multiplies it.

Column-parallel ranks hold rows of the weight and compute their own output features. Row-parallel ranks hold columns
and each returns a partial sum, which the next norm reduces (Shoeybi et al. 2019, Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.act_mul import Activation
from headrace.kernels.act_mul_quantise import act_mul_quantise
from headrace.kernels.quantise import Form, Quantised
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act
from headrace.layers.weights import Parameter, Part, Slot
from headrace.quant.port import GatedRecipe, PreparedWeight, Recipe, Stored


@dataclass(frozen=True, slots=True)
class Output:
    """One slot of a linear's output: its name, its features in the checkpoint, and [start, stop) of this rank."""

    name: str
    features: int
    share: tuple[int, int]

    @property
    def local_features(self) -> int:
        return self.share[1] - self.share[0]


class Linear:
    """y = x W^T + b, the weight stored as its recipe wants it."""

    def __init__(
        self,
        name: str,
        *,
        weight: Sequence[Slot],
        bias: Sequence[Slot],
        recipe: Recipe,
        dtype: torch.dtype,
        device: torch.device,
        keeps_bias: bool = True,
    ) -> None:
        """
        Args:
            weight: slots of the plain weight; the recipe says which tensors a checkpoint holds for it.
        """
        self.name = name
        self.recipe = recipe
        self.dtype = dtype
        self.device = device
        self._stored = {stored.name: _parameter(name, stored, weight, device=device) for stored in recipe.stored(dtype)}
        self._widths = tuple(slot.local_shape[0] for slot in weight)
        self._bias = Parameter(f"{name}.bias", bias, dtype=dtype, device=device) if bias else None
        self._keeps_bias = keeps_bias
        self._prepared: PreparedWeight | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self._stored.values(),) if self._bias is None else (*self._stored.values(), self._bias)

    def finish(self) -> None:
        bias = None if self._bias is None else self._bias.take()
        tensors = {name: parameter.take() for name, parameter in self._stored.items()}
        self._prepared = self.recipe.load(
            tensors, bias if self._keeps_bias else None, widths=self._widths, dtype=self.dtype
        )

    def take_plain(self) -> Tensor:
        """[out, in] of this rank, in the model's dtype: what it multiplies with. Nothing is kept here."""
        assert self._prepared is not None and self._bias is None, self.name
        unit = torch.eye(self._prepared.in_features, dtype=self.dtype, device=self.device)
        weight = self.recipe.linear(Act(unit), self._prepared, out_dtype=self.dtype).T
        self._prepared = None
        return weight

    @property
    def wanted(self) -> Form:
        """How it takes activations best; it takes plain ones too."""
        assert self._prepared is not None, f"{self.name} is not loaded"
        return self.recipe.wanted(self._prepared)

    def __call__(self, act: Act) -> Tensor:
        """[tokens, in] -> [tokens, out] of this rank"""
        assert self._prepared is not None, f"{self.name} is not loaded"
        return self.recipe.linear(act, self._prepared)

    def gated(self, act: Act, kind: Activation, *, form: Form) -> Quantised:
        """[tokens, in] -> activation(gate) * up in `form` [tokens, out / 2], the gates first in this rank's outputs."""
        assert self._prepared is not None, f"{self.name} is not loaded"
        if isinstance(self.recipe, GatedRecipe):
            return self.recipe.gated(act, self._prepared, kind, form=form)
        return act_mul_quantise(self(act), kind, form=form)


def _parameter(linear: str, stored: Stored, weight: Sequence[Slot], *, device: torch.device) -> Parameter:
    """The parameter of one stored tensor: slots and shares of the weight, in its units."""
    slots = [_slot(linear, stored, slot) for slot in weight]
    init = "normal" if stored.rows == stored.columns == 1 else "one"
    return Parameter(
        f"{linear}.{stored.name}",
        slots,
        dtype=stored.dtype,
        device=device,
        init=init,
        becomes_fp8=stored.becomes_fp8,
    )


def _slot(linear: str, stored: Stored, slot: Slot) -> Slot:
    if stored.rows is None:
        return Slot(slot.name, (1,))
    sides = (stored.rows, stored.columns)
    shape = tuple(1 if side is None else -(-size // side) for size, side in zip(slot.shape, sides))
    part, side = slot.part, None if slot.part is None else sides[slot.part.dim]
    if part is None or side is None:
        return Slot(slot.name, shape)
    if part.start % side or (part.stop % side and part.stop != slot.shape[part.dim]):
        raise ValueError(
            f"{linear}: a rank's share [{part.start}, {part.stop}) cuts blocks of {side} that share a scale:"
            " choose a tensor_parallel_size that divides the blocks"
        )
    return Slot(slot.name, shape, Part(part.dim, part.start // side, -(-part.stop // side)))


def replicated_linear(
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Every rank holds and computes all of it."""
    return Linear(
        name,
        weight=[Slot("", (out_features, in_features))],
        bias=[Slot("", (out_features,))] if bias else [],
        recipe=recipe,
        dtype=dtype,
        device=device,
    )


def column_linear(
    name: str,
    in_features: int,
    outputs: Sequence[Output],
    *,
    bias: bool,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Each rank computes its share of the output features; slots are fused into one product."""
    return Linear(
        name,
        weight=[Slot(out.name, (out.features, in_features), Part(0, *out.share)) for out in outputs],
        bias=[Slot(out.name, (out.features,), Part(0, *out.share)) for out in outputs] if bias else [],
        recipe=recipe,
        dtype=dtype,
        device=device,
    )


def row_linear(
    name: str,
    in_features: int,
    out_features: int,
    *,
    share: tuple[int, int],
    bias: bool,
    parallel: ParallelContext,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Each rank multiplies its share of the input features; the result is a partial sum. Rank 0 adds the bias."""
    return Linear(
        name,
        weight=[Slot("", (out_features, in_features), Part(1, *share))],
        bias=[Slot("", (out_features,))] if bias else [],
        recipe=recipe,
        dtype=dtype,
        device=device,
        keeps_bias=parallel.rank == 0,
    )
