"""Tensors of a checkpoint that no layer takes but speculation will: mapped from its files, read when first touched."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.checkpoint import FileTensor, read_checkpoint
from headrace.hub.source import ModelSource
from headrace.layers.weights import WeightMap

log = logging.getLogger("headrace.engine")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a file."""

    path: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class KeptWeights(Mapping[str, Tensor]):
    """By canonical name, on the host, in the dtype of the checkpoint and whole, whatever the rank. Files are mapped
    with the first tensor of them that is asked for, and pages are read with the first access."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._files: dict[Path, mmap.mmap] = {}

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if place.path not in self._files:
            with place.path.open("rb") as file:
                # Copied on write: torch has no tensors that can't be written to.
                self._files[place.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        flat = torch.frombuffer(self._files[place.path], dtype=place.dtype, count=count, offset=place.begin)
        return flat.view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def size_bytes(self) -> int:
        """Of all, should all be read."""
        return sum(place.size_bytes for place in self._places.values())


def find_kept(source: ModelSource, weights: WeightMap) -> KeptWeights:
    """The tensors that `weights.kept` names; headers are read, nothing else. GGUF files have none."""
    if not weights.kept or source.kind == "gguf":
        return KeptWeights({})
    places: dict[str, Place] = {}
    for stored in read_checkpoint(source):
        name = weights.canonical(stored.name)
        if isinstance(stored, FileTensor) and weights.is_kept(name):
            places[name] = Place(stored.file.path, stored.begin, stored.shape, stored.dtype)
    return KeptWeights(places)


def keep_or_leave(source: ModelSource, weights: WeightMap, *, load_format: str, is_wanted: bool) -> KeptWeights:
    """What speculation finds, and one line of the log about it. Nothing where nobody asked for speculation, or where
    weights are drawn and none are read."""
    found = find_kept(source, weights) if load_format == "auto" else KeptWeights({})
    if found:
        what = f"{len(found)} tensors of multi-token prediction ({_families(found)}), {found.size_bytes:,} bytes"
        if is_wanted:
            log.info("%s, are kept for speculation, mapped from the checkpoint", what)
        else:
            log.info("%s, stay in the checkpoint: speculation is off", what)
    return found if is_wanted else KeptWeights({})


def _families(names: Iterable[str]) -> str:
    """`model.layers.61` for what lies under it, `mtp`."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found[".".join(parts[:3] if "layers" in parts[:2] else parts[:1])] = None
    return ", ".join(found)
