"""Loading weights: every tensor of a checkpoint to its place, every parameter from a tensor, or a fatal error.

Tensors stream: a run of rows of one tensor is in memory beside the weights, and a module packs its weight as soon as
its slots are complete. Pickled weights are never read.
"""

from __future__ import annotations

import math
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from headrace.engine.checkpoint import Piece, StoredTensor, columns, read_checkpoint
from headrace.hub.source import ModelSource
from headrace.layers.port import Model
from headrace.layers.weights import Init, Part, Slot, Target, WeightMap

DUMMY_STD = 0.02
CONSTANTS: Mapping[Init, float] = {"zero": 0.0, "one": 1.0, "exponents": 120.0}
NOISE_ELEMENTS = 1 << 22
"""Random numbers drawn at once."""
PROGRESS_AFTER_S = 1.0
COMPARED_ROWS = 4096
MAX_NAMES = 8
"""Most names that a message lists."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load brought on this rank."""

    weight_bytes: int
    """That it holds, before packing; tied tensors count once."""
    num_tensors: int
    load_s: float


def load_weights(model: Model, source: ModelSource, *, load_format: str = "auto", progress: bool = True) -> LoadReport:
    """Fill every parameter of the model.

    Args:
        load_format: "dummy" draws random weights, N(0, 0.02) and norms of scale 1, and reads no tensor.
        progress: show a bar on stderr when loading takes longer than a second.

    Raises:
        ValueError: a truncated or damaged file; tensors missing, unexpected, of a wrong shape, or stored with other
            values though the config ties them, all by name; a load format that is not known.
    """
    start_s = time.monotonic()
    weights = model.weight_map()
    if load_format == "auto":
        num_tensors = _load(weights, source, progress=progress)
    elif load_format == "dummy":
        num_tensors = _fill_dummy(weights)
    else:
        raise ValueError(f"load_format {load_format!r} is not supported: use auto or dummy")
    return LoadReport(weights.held_bytes, num_tensors, time.monotonic() - start_s)


@dataclass(slots=True)
class _Faults:
    """What is wrong with a checkpoint, by kind; reported at once."""

    unexpected: list[str] = field(default_factory=list[str])
    twice: list[str] = field(default_factory=list[str])
    shapes: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    untied: list[str] = field(default_factory=list[str])

    def check(self, source: ModelSource) -> None:
        kinds = [
            ("missing", self.missing, "is the download complete, and does config.json fit it?"),
            ("unexpected", self.unexpected, "does config.json fit it?"),
            ("of a wrong shape", self.shapes, "does config.json fit it?"),
            ("stored twice", self.twice, "keep one of the files"),
            ("stored with other values, though the config ties them", self.untied, "set tie_word_embeddings to false"),
        ]
        found = [(what, names, remedy) for what, names, remedy in kinds if names]
        if found:
            lists = "; ".join(f"tensors {what}: {_listed(names)}" for what, names, _ in found)
            raise ValueError(f"{source.path} doesn't fit the model: {lists} ({found[0][2]})")


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))  # one for several slots is named once
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _load(weights: WeightMap, source: ModelSource, *, progress: bool) -> int:
    apart, left_out = _check_names(weights, source)
    targets = _targets(weights)
    for target in left_out:
        target.parameter.view(target.slot).fill_(target.parameter.default or 0.0)
        _finish_slot(target)
    # What stored tensors have to equal outlives the packing only where there is such a tensor.
    kept = {weights.tied[name]: _view(weights, weights.tied[name]) for name in apart}
    bar = tqdm(
        total=len(targets),
        desc="Loading weights",
        unit="tensor",
        delay=PROGRESS_AFTER_S,
        file=sys.stderr,
        disable=None if progress else True,  # None: no bar where nobody sees it move
        leave=False,
    )
    with bar, torch.inference_mode():
        for stored in _stored(weights, source):
            name = weights.canonical(stored.name)
            if name not in weights.tied and not weights.is_ignored(name):
                target = _found(weights, name)
                stored.read(_shaped(target.parameter.view(target.slot), stored.shape), target.slot.part)
                _check_spare(stored, target)
                _finish_slot(target)
                bar.update()
        if kept:
            _check_ties(weights, source, kept)
    return len(targets)


def _stored(weights: WeightMap, source: ModelSource) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint; of one that holds several, each of them."""
    for stored in read_checkpoint(source):
        pieces = weights.pieces(weights.canonical(stored.name))
        first, total = 0, sum(pieces.values())
        for name, rows in pieces.items():
            yield Piece(stored, name, first, rows, total)
            first += rows
        if not pieces:
            yield stored


def _shaped(view: Tensor, stored_shape: tuple[int, ...]) -> Tensor:
    """A single number is stored with one dimension or without."""
    return view.view(stored_shape) if stored_shape == () else view


def _check_spare(stored: StoredTensor, target: Target) -> None:
    """What stands behind a slot's rows is filling: anything but zeros would have a meaning that is not known here."""
    rows = target.slot.shape[0]
    if not target.slot.spare_rows or stored.shape[0] == rows:
        return
    spare = torch.empty((stored.shape[0] - rows, *stored.shape[1:]), dtype=torch.float32)
    stored.read(spare, Part(0, rows, stored.shape[0]))
    if spare.any():
        raise ValueError(
            f"tensor {stored.name} has {stored.shape[0]} rows: only the first {rows} are known, and the others are not"
            " zero: is it another model's?"
        )


def _check_names(weights: WeightMap, source: ModelSource) -> tuple[set[str], list[Target]]:
    """Compare names and shapes both ways before any tensor is read.

    -> tied tensors that are stored nevertheless, and slots that are left out and may be
    """
    faults = _Faults()
    seen: set[str] = set()
    filled: set[tuple[str, str]] = set()
    for stored in _stored(weights, source):
        name = weights.canonical(stored.name)
        if weights.is_ignored(name):
            continue
        target = weights.find(weights.tied.get(name, name))
        if target is None:
            faults.unexpected.append(stored.name)
        elif not target.slot.fits(stored.shape or (1,)):
            faults.shapes.append(f"{stored.name} {list(stored.shape)} instead of {list(target.slot.shape)}")
        elif name in seen or (name not in weights.tied and _slots_of(target) & filled):
            faults.twice.append(stored.name)
        if target is not None and name not in weights.tied:
            filled |= _slots_of(target)
        seen.add(name)
    left_out: list[Target] = []
    for target in _targets(weights):
        if (target.parameter.name, target.slot.name) not in filled:
            if target.parameter.default is not None:
                left_out.append(target)
            else:
                faults.missing.append(weights.checkpoint_name(target.parameter, target.slot.name))
    faults.check(source)
    return seen & weights.tied.keys(), left_out


def _slots_of(target: Target) -> set[tuple[str, str]]:
    """(parameter, slot) of all that a tensor fills: some checkpoints hold several slots in one."""
    return {(target.parameter.name, name) for name in target.parameter.covered(target.slot)}


def _check_ties(weights: WeightMap, source: ModelSource, kept: Mapping[str, Tensor]) -> None:
    """Tensors that are stored though the config ties them must hold what they are tied to."""
    faults = _Faults()
    for stored in read_checkpoint(source):
        partner = weights.tied.get(weights.canonical(stored.name))
        if partner is not None and not _is_equal(stored, kept[partner], _found(weights, partner).slot):
            faults.untied.append(stored.name)
    faults.check(source)


def _is_equal(stored: StoredTensor, loaded: Tensor, slot: Slot) -> bool:
    """Compares runs of rows, converted to the loaded dtype."""
    assert slot.part is None or slot.part.dim == 0, "ties are between tensors sharded by rows"
    first = 0 if slot.part is None else slot.part.start
    for start in range(0, loaded.shape[0], COMPARED_ROWS):
        rows = loaded[start : start + COMPARED_ROWS]
        other = torch.empty_like(rows)
        stored.read(other, Part(0, first + start, first + start + len(rows)))
        if not torch.equal(rows, other):
            return False
    return True


def _targets(weights: WeightMap) -> list[Target]:
    """Every slot that a checkpoint has to fill."""
    return [
        Target(module, parameter, slot)
        for module in weights.modules
        for parameter in module.parameters
        for slot in parameter.slots
    ]


def _found(weights: WeightMap, name: str) -> Target:
    target = weights.find(name)
    assert target is not None, name
    return target


def _view(weights: WeightMap, name: str) -> Tensor:
    target = _found(weights, name)
    return target.parameter.view(target.slot)


def _finish_slot(target: Target) -> None:
    target.parameter.mark_loaded(target.slot)
    if all(parameter.is_loaded for parameter in target.module.parameters):
        target.module.finish()


def _fill_dummy(weights: WeightMap) -> int:
    targets = _targets(weights)
    with torch.inference_mode():
        for target in targets:
            if target.parameter.init in CONSTANTS:
                target.parameter.view(target.slot).fill_(CONSTANTS[target.parameter.init])
            else:
                _fill_noise(target)
            _finish_slot(target)
    return len(targets)


def _fill_noise(target: Target) -> None:
    """This rank's part of a tensor that is the same in each process and for any number of ranks; by runs of rows."""
    slot, parameter = target.slot, target.parameter
    view, part = parameter.view(slot), slot.part
    first, end = (part.start, part.stop) if part is not None and part.dim == 0 else (0, slot.shape[0])
    rows_a_run = max(1, NOISE_ELEMENTS // math.prod(slot.shape[1:]))
    generator = torch.Generator(parameter.device)
    for start in range(first - first % rows_a_run, end, rows_a_run):
        generator.manual_seed(zlib.crc32(f"{parameter.name}:{slot.name}:{start}".encode()))
        shape = (min(rows_a_run, slot.shape[0] - start), *slot.shape[1:])
        if parameter.init == "bytes":
            rows = torch.randint(256, shape, generator=generator, device=parameter.device)
        else:
            rows = torch.randn(shape, generator=generator, device=parameter.device).mul_(DUMMY_STD)
        if part is not None and part.dim > 0:
            rows = columns(rows, part)
        low, high = max(start, first), min(start + rows_a_run, end)
        view[low - first : high - first].copy_(rows[low - start : high - start])
