"""One product's weights of all experts: the parameters that a checkpoint fills, expert by expert or in one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.moe.port import Stacked
from headrace.layers.weights import Init, LinearNames, Parameter, Part, Slot, WeightMap
from headrace.quant.port import ExpertsRecipe, Stored

FUSED = "fused"
"""The slot of a tensor that holds all experts."""


class ByExpert:
    """A number for each expert of the model: the parameter `name`."""

    def __init__(self, name: str, num_experts: int, *, dtype: torch.dtype, device: torch.device, init: Init) -> None:
        self._values = Parameter(name, [Slot("", (num_experts,))], dtype=dtype, device=device, init=init)
        self._loaded: Tensor | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self._values,)

    def finish(self) -> None:
        self._loaded = self._values.take()

    def ready(self) -> Tensor:
        assert self._loaded is not None, f"{self._values.name} is not loaded"
        return self._loaded


@dataclass(frozen=True, slots=True)
class ExpertsShare:
    """What a rank holds of a layer's experts, as [start, stop)."""

    experts: tuple[int, int]
    inner: tuple[int, int]
    """Of every expert's inner features."""

    @property
    def num_experts(self) -> int:
        return self.experts[1] - self.experts[0]


@dataclass(frozen=True, slots=True)
class Side:
    """The weight of one product of one expert: [out, in], `pieces` of them one below the other in a fused tensor."""

    names: tuple[str, ...]
    """Of the weights that are fused in it; ("",) for one."""
    out_features: int
    """Of each, in the whole model."""
    in_features: int
    cut: int
    """The dimension that ranks share: 0 is out, 1 is in."""
    is_interleaved: bool = False


class StackedLinear:
    """The parameters of one product."""

    def __init__(
        self,
        name: str,
        side: Side,
        *,
        num_experts: int,
        share: ExpertsShare,
        recipe: ExpertsRecipe,
        bias: bool,
        keeps_bias: bool = True,
        transposed: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            transposed: a fused plain tensor has each expert's weight transposed.
            keeps_bias: False on ranks whose partial sum leaves the bias to another.
        """
        self.name = name
        self.recipe = recipe
        self._dtype = dtype
        self._share = share
        self._stored = {
            stored.name: StackedParameter(
                name, stored, side, num_experts=num_experts, share=share, transposed=transposed, device=device
            )
            for stored in recipe.stored(dtype)
        }
        self._bias = None
        if bias:
            whole = Stored("bias", dtype, 1, None)
            self._bias = StackedParameter(
                name, whole, side, num_experts=num_experts, share=share, transposed=False, device=device
            )
        self._keeps_bias = keeps_bias
        inner = share.inner[1] - share.inner[0]
        self._widths = [inner if side.cut == 0 else side.out_features] * len(side.names)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self._stored.values(),) if self._bias is None else (*self._stored.values(), self._bias)

    def stack(self) -> Stacked:
        """The weights, once they are loaded; the parameters keep nothing."""
        tensors = {name: parameter.take() for name, parameter in self._stored.items()}
        bias = None if self._bias is None else self._bias.take().flatten(1)
        if not self._keeps_bias:
            bias = None
        return self.recipe.stack(tensors, bias, widths=self._widths, dtype=self._dtype)


class StackedParameter(Parameter):
    """One stored tensor of all experts on this rank: [experts, fused weights' rows, ...].

    Its slots are `{expert}.{weight}`, one expert's after the other's; `fused` stands for all of them.
    """

    def __init__(
        self,
        linear: str,
        stored: Stored,
        side: Side,
        *,
        num_experts: int,
        share: ExpertsShare,
        transposed: bool,
        device: torch.device,
    ) -> None:
        slots = [
            Slot(_slot_name(expert, name), *_place(linear, stored, side, share, expert))
            for expert in range(num_experts)
            for name in side.names
        ]
        super().__init__(
            f"{linear}.{stored.name}",
            slots,
            dtype=stored.dtype,
            device=device,
            init=_init(stored),
            becomes_fp8=stored.becomes_fp8,
        )
        self._experts = share.num_experts
        self._is_transposed = transposed and stored.rows == stored.columns == 1
        self._fused = _fused(slots, side, num_experts, share, transposed=self._is_transposed)
        self._is_interleaved = side.is_interleaved and len(side.names) > 1

    def find(self, name: str) -> Slot | None:
        return self._fused if name == FUSED else super().find(name)

    def covered(self, slot: Slot) -> Sequence[str]:
        return [other.name for other in self.slots] if slot is self._fused else super().covered(slot)

    def view(self, slot: Slot) -> Tensor:
        if slot is not self._fused:
            return self._alternate(slot) if self._is_interleaved else super().view(slot)
        stacked = self._whole().unflatten(0, (self._experts, -1))
        return stacked.transpose(1, 2) if self._is_transposed else stacked

    def _whole(self) -> Tensor:
        """The storage, allocated if need be."""
        super().view(self.slots[0])
        assert self._data is not None
        return self._data

    def _alternate(self, slot: Slot) -> Tensor:
        """Every other row of the expert's."""
        expert, _, name = slot.name.partition(".")
        names = [other.name.partition(".")[2] for other in self.slots[:2]]
        of_expert = self._whole().unflatten(0, (self._experts, -1))[int(expert)]
        return of_expert[names.index(name) :: len(names)]

    def take(self) -> Tensor:
        """[experts, rows, ...]"""
        return super().take().unflatten(0, (self._experts, -1))


def stacked_names(weights: WeightMap, name: str, slots: Sequence[str], num_experts: int) -> LinearNames:
    """What checkpoints call the first and the last expert's, each of which may be in a tensor of all.

    Args:
        name, slots: of a `StackedLinear`, and `Side.names` of it.
    """
    (joined,) = weights.linear_names(name, [FUSED]).stored
    around = [tensor.rpartition(".")[0] for tensor in joined]
    ends = [_slot_name(expert, slot) for expert in (0, num_experts - 1) for slot in slots]
    alone = weights.linear_names(name, ends).stored
    return LinearNames(name, tuple((*names, *joined, *around) for names in alone))


def _slot_name(expert: int, weight: str) -> str:
    return f"{expert}.{weight}" if weight else str(expert)


def _init(stored: Stored) -> Init:
    if stored.is_scale:
        return "exponents"
    if not stored.dtype.is_floating_point:
        return "bytes"
    return "normal" if stored.rows == stored.columns == 1 else "one"


def _place(
    linear: str, stored: Stored, side: Side, share: ExpertsShare, expert: int
) -> tuple[tuple[int, ...], Part | None]:
    """(shape in the checkpoint, what this rank keeps) of one expert's tensor for one weight."""
    first, last = share.experts
    if stored.rows is None:
        return (1,), None if first <= expert < last else Part(0, 0, 0)
    shape = (-(-side.out_features // stored.rows),)
    if stored.name != "bias":
        shape = (*shape, 1 if stored.columns is None else -(-side.in_features // stored.columns), *stored.inner)
    if not first <= expert < last:
        return shape, Part(0, 0, 0)
    unit = stored.rows if side.cut == 0 else stored.columns
    if unit is None or side.cut >= len(shape):
        return shape, None
    start, stop = share.inner
    total = side.out_features if side.cut == 0 else side.in_features
    if (start, stop) == (0, total):
        return shape, None
    if start % unit or (stop % unit and stop != total):
        raise ValueError(
            f"{linear}: a rank's share [{start}, {stop}) cuts blocks of {unit} that share a scale: choose a"
            " tensor_parallel_size that divides the blocks"
        )
    return shape, Part(side.cut, start // unit, -(-stop // unit))


def _fused(slots: Sequence[Slot], side: Side, num_experts: int, share: ExpertsShare, *, transposed: bool) -> Slot:
    """The slot of one tensor for all experts and fused weights."""
    one, count = next(slot for slot in slots if slot.part != Part(0, 0, 0)), len(side.names)
    shape = (num_experts, one.shape[0] * count, *one.shape[1:])
    part = one.part
    if share.num_experts < num_experts:
        assert part is None, "a rank has whole experts or shares of all of them"
        return Slot(FUSED, _turned(shape, transposed), Part(0, *share.experts))
    if part is not None:
        if part.dim == 0 and side.is_interleaved:
            part = Part(1, count * part.start, count * part.stop)
        else:
            part = Part(part.dim + 1, part.start, part.stop, count if part.dim == 0 else 1)
        if transposed:
            part = Part(3 - part.dim, part.start, part.stop, part.pieces)
    return Slot(FUSED, _turned(shape, transposed), part)


def _turned(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], *shape[3:]) if transposed else shape


def inner_unit(recipe: ExpertsRecipe, dtype: torch.dtype) -> int:
    """Inner features that ranks must not part."""
    sides = [side for stored in recipe.stored(dtype) for side in (stored.rows, stored.columns) if side]
    return math.lcm(*sides)
