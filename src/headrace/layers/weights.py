"""Where checkpoint tensors go: parameters with their slots, and the map from checkpoint names to them.

A module declares `Parameter`s: what a checkpoint holds for them (slots, with the checkpoint's shapes) and which
part of that this rank keeps. A model declares a `WeightMap`: names only. The loader brings the two together.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.config.on_load import fp8_bits

MAPPED_BYTES = 1 << 20
"""From this size on a parameter on the CPU has a mapping of its own."""

Init = Literal["normal", "zero", "one", "bytes", "exponents"]
"""What `load_format: dummy` draws: `bytes` are random codes, `exponents` the scales (e8m0) that make small weights."""


@dataclass(frozen=True, slots=True)
class Part:
    """The piece of a checkpoint tensor that a rank keeps: [start, stop) along `dim`."""

    dim: int
    start: int
    stop: int
    pieces: int = 1
    """The tensor is that many equal ones joined along `dim`, and [start, stop) is kept of each."""

    @property
    def length(self) -> int:
        """Along `dim`, of what is kept."""
        return self.pieces * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Slot:
    """One checkpoint tensor's place in a parameter."""

    name: str
    """Empty when the parameter is one checkpoint tensor."""
    shape: tuple[int, ...]
    """In the checkpoint."""
    part: Part | None = None
    """What this rank keeps; None is everything."""
    spare_rows: int = 0
    """A checkpoint may have so many rows of zeros behind these. The slot has a `part` along dim 0 then."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a checkpoint's tensor may have this shape."""
        return shape in (self.shape, (self.shape[0] + self.spare_rows, *self.shape[1:]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.part is None:
            return self.shape
        shape = list(self.shape)
        shape[self.part.dim] = self.part.length
        return tuple(shape)


class Parameter:
    """One tensor of a module on this rank, filled slot by slot.

    Slots lie one after another along dim 0. Storage is allocated when the first slot arrives and leaves with `take`,
    so that a module can pack its weight and drop the plain one.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        *,
        dtype: torch.dtype,
        device: torch.device,
        init: Init = "normal",
        num_padding: int = 0,
        default: float | None = None,
        becomes_fp8: bool = False,
    ) -> None:
        """
        Args:
            init: what `load_format: dummy` fills it with.
            num_padding: zero rows after the last slot.
            default: the value of a slot that a checkpoint leaves out; None if it may not.
            becomes_fp8: as of the quant room's `Stored`.
        """
        self.name = name
        self.slots = tuple(slots)
        self.dtype = dtype
        self.device = device
        self.init: Init = init
        self.default = default
        self.becomes_fp8 = becomes_fp8
        rows = sum(slot.local_shape[0] for slot in self.slots) + num_padding
        self.shape = (rows, *self.slots[0].local_shape[1:])
        self._data: Tensor | None = None
        self._missing = {slot.name for slot in self.slots}
        self._by_name = {slot.name: slot for slot in self.slots}
        ends = accumulate((slot.local_shape[0] for slot in self.slots), initial=0)
        self._offsets = {slot.name: offset for slot, offset in zip(self.slots, ends)}

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Once it's loaded, before any packing."""
        return round(math.prod(self.shape) * fp8_bits(self.shape[-1]) / 8) if self.becomes_fp8 else self.size_bytes

    @property
    def is_loaded(self) -> bool:
        return not self._missing

    @property
    def missing(self) -> list[str]:
        """Names of the slots that have not arrived."""
        return [slot.name for slot in self.slots if slot.name in self._missing]

    def slot(self, name: str) -> Slot:
        slot = self.find(name)
        assert slot is not None, f"{self.name} has no slot {name!r}"
        return slot

    def find(self, name: str) -> Slot | None:
        return self._by_name.get(name)

    def covered(self, slot: Slot) -> Sequence[str]:
        """Names of the `slots` that a checkpoint's tensor for this one fills."""
        return (slot.name,)

    def view(self, slot: Slot) -> Tensor:
        """The place to write a slot's part to."""
        if self._data is None:
            self._data = _zeros(self.shape, self.dtype, self.device)
        return self._data.narrow(0, self._offsets[slot.name], slot.local_shape[0])

    def mark_loaded(self, slot: Slot) -> None:
        self._missing.difference_update(self.covered(slot))

    def take(self) -> Tensor:
        """Hand over the data; the parameter keeps nothing."""
        assert self._data is not None and self.is_loaded, self.name
        data, self._data = self._data, None
        return data


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; large ones on the CPU in a mapping of their own.

    Most of these leave again when a recipe packs them. From the allocator's heap they would leave holes that count as
    memory beside the weights; a mapping is given back whole, and takes memory only where it was written.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size_bytes < MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype).view(shape)


class Loadable(Protocol):
    """A module with parameters. `finish` is called once, when all of them are loaded."""

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor (or one of the equal-ranked pieces of a fused one) goes."""

    module: Loadable
    parameter: Parameter
    slot: Slot


@dataclass(frozen=True, slots=True)
class LinearNames:
    """A linear by its name here, and by what a checkpoint may call it."""

    here: str
    stored: tuple[tuple[str, ...], ...] = ()
    """For each of the checkpoint's linears that are one here, every name that it may have there, without `.weight`.
    Empty where nobody said."""


Fused = Mapping[str, Mapping[str, int]]
"""Name of a checkpoint tensor -> the names of those that it holds one after another, and the rows of each."""


@dataclass(frozen=True)
class WeightMap:
    """Checkpoint names -> parameters and slots.

    In names, `*` stands for one segment between dots; stars of a target are filled from the name's, in order.

    Fields:
        modules: every module that has parameters.
        rules: checkpoint name -> `parameter` or `parameter:slot`.
        ignored: names that may stand in a checkpoint and are of no use, such as a rotary `inv_freq`.
        tied: checkpoint name -> the checkpoint name that it is the same tensor as. It may be left out of the
            checkpoint, and must be equal where it isn't.
        renamed: prefix -> prefix, tried in order before the rules; the first that fits is replaced.
        kept: names that no part here takes, but speculation does (multi-token prediction).
        fused: tensors that are read as several, by row; rules, `ignored` and `tied` know the several.
    """

    modules: Sequence[Loadable]
    rules: Mapping[str, str]
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    fused: Fused = field(default_factory=dict[str, Mapping[str, int]])
    kept: Sequence[str] = ()

    def pieces(self, name: str) -> dict[str, int]:
        """Names and rows of what a checkpoint's tensor holds, by its canonical name; empty where it is one."""
        for pattern, pieces in self._fused:
            match = pattern.fullmatch(name)
            if match:
                return {_fill(piece, match.groups()): rows for piece, rows in pieces.items()}
        return {}

    def canonical(self, name: str) -> str:
        for old, new in self.renamed.items():
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def is_ignored(self, name: str) -> bool:
        """Whether a load passes it by."""
        return any(pattern.fullmatch(name) for pattern in self._ignored) or self.is_kept(name)

    def is_kept(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._kept)

    def find(self, name: str) -> Target | None:
        """The place of a checkpoint tensor (by its canonical name); None when no rule or no parameter fits."""
        if name not in self._places:
            self._places[name] = self._find(name)
        return self._places[name]

    def _find(self, name: str) -> Target | None:
        for pattern, target in self._rules:
            match = pattern.fullmatch(name)
            if match:
                parameter, _, slot = _fill(target, match.groups()).partition(":")
                if parameter in self._parameters:
                    module, found = self._parameters[parameter]
                    place = found.find(slot)
                    return None if place is None else Target(module, found, place)
        return None

    def checkpoint_name(self, parameter: Parameter, slot_name: str) -> str:
        """The inverse of `find`, for messages: what a checkpoint calls this slot."""
        wanted = _place(parameter.name, slot_name)
        for name in self._sources(wanted):
            return next(self._holders(name), name)
        return wanted

    def with_names(self, other: WeightMap) -> WeightMap:
        """The other's names beside these; its modules aren't taken."""
        return replace(
            self,
            rules={**self.rules, **other.rules},
            ignored=(*self.ignored, *other.ignored),
            tied={**self.tied, **other.tied},
            renamed={**self.renamed, **other.renamed},
            fused={**self.fused, **other.fused},
            kept=(*self.kept, *other.kept),
        )

    def linear_names(self, linear: str, slots: Sequence[str]) -> LinearNames:
        """What checkpoints call a linear, which need not be there yet: by every rule, alone or in a fused tensor, with
        every prefix."""
        return LinearNames(linear, tuple(self._linear_names(linear, slot) for slot in slots))

    def _linear_names(self, linear: str, slot: str) -> tuple[str, ...]:
        names = [*self._sources(_place(f"{linear}.weight", slot))]
        names += [holder for name in names for holder in self._holders(name)]
        prefixed = [
            old + name[len(new) :] for name in names for old, new in self.renamed.items() if name.startswith(new)
        ]
        return tuple(name.removesuffix(".weight") for name in (*names, *prefixed)) or (linear,)

    def _sources(self, place: str) -> Iterator[str]:
        """Names whose rules lead to this `parameter` or `parameter:slot`."""
        for pattern, source in self._targets:
            match = pattern.fullmatch(place)
            if match:
                yield _fill(source, match.groups())

    def _holders(self, name: str) -> Iterator[str]:
        """The fused tensors that may hold this one."""
        for pattern, holder in self._held:
            match = pattern.fullmatch(name)
            if match:
                yield _fill(holder, match.groups())

    @property
    def weight_bytes(self) -> int:
        """On this rank, as a checkpoint stores them; known before anything is loaded. Numbers with a default aren't
        counted."""
        return sum(parameter.size_bytes for _, parameter in self._parameters.values() if parameter.default is None)

    @property
    def held_bytes(self) -> int:
        """Of the same parameters, what stays once they are loaded, before any packing."""
        return sum(parameter.held_bytes for _, parameter in self._parameters.values() if parameter.default is None)

    @cached_property
    def _parameters(self) -> dict[str, tuple[Loadable, Parameter]]:
        return {parameter.name: (module, parameter) for module in self.modules for parameter in module.parameters}

    @cached_property
    def _places(self) -> dict[str, Target | None]:
        """What `find` has found: a loader asks several times, of tens of thousands of experts' tensors."""
        return {}

    @cached_property
    def _rules(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(source), target) for source, target in self.rules.items()]

    @cached_property
    def _targets(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(target), source) for source, target in self.rules.items()]

    @cached_property
    def _held(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(piece), holder) for holder, pieces in self.fused.items() for piece in pieces]

    @cached_property
    def _fused(self) -> list[tuple[re.Pattern[str], Mapping[str, int]]]:
        return [(_pattern(name), pieces) for name, pieces in self.fused.items()]

    @cached_property
    def _ignored(self) -> list[re.Pattern[str]]:
        return [_pattern(pattern) for pattern in self.ignored]

    @cached_property
    def _kept(self) -> list[re.Pattern[str]]:
        return [_pattern(pattern) for pattern in self.kept]


def _place(parameter: str, slot: str) -> str:
    """As the target of a rule has it."""
    return f"{parameter}:{slot}" if slot else parameter


def _pattern(name: str) -> re.Pattern[str]:
    """`*` is one segment, `**` any number of them."""
    pieces = re.split(r"(\*\*|\*)", name)
    wild = {"**": "(.+)", "*": "([^.:]+)"}
    return re.compile("".join(wild.get(piece) or re.escape(piece) for piece in pieces))


def _fill(name: str, segments: Sequence[str]) -> str:
    filled = iter(segments)
    return re.sub(r"\*", lambda _: next(filled), name)
