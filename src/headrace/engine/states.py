"""Recurrent states of one rank: the live ones, one a slot, and their way into snapshots and back.

A slot's states of all layers of a group lie in one row, in the order of the layers, each tensor at a multiple of
ALIGN_BYTES. A snapshot is a copy of that row, so tiers move it like any block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.engine.pools import copy_rows, row_index, zeroed
from headrace.layers.port import RecurrentLayer, StateSpec
from headrace.seam import GroupSpec, Ints

ALIGN_BYTES = 16


def state_specs(layers: Iterable[Any]) -> dict[int, StateSpec]:
    """By layer, of those that are recurrent."""
    return {index: layer.state for index, layer in enumerate(layers) if isinstance(layer, RecurrentLayer)}


def state_bytes(specs: Iterable[StateSpec]) -> int:
    """Of one sequence over all these layers: `GroupSpec.state_bytes`."""
    return sum(_tensor_bytes(shape, dtype) for spec in specs for shape, dtype in zip(spec.shapes, spec.dtypes))


class States:
    """The live states. Without recurrent groups it holds nothing and does nothing."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        specs: Mapping[int, StateSpec],
        *,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            specs: by layer, for every layer of the recurrent groups.
        """
        self.dummy_slot = num_slots
        """Rows of sequences that have ended write here."""
        self._device = torch.device(device)
        self._rows: dict[int, Tensor] = {}
        """By group, uint8 [slots + 1, bytes]."""
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        """By layer, [slots + 1, *shape] each: views into the rows."""
        for index, group in enumerate(groups):
            if not group.is_recurrent:
                continue
            assert group.state_bytes == state_bytes(specs[layer] for layer in group.layers), group
            rows = zeroed((num_slots + 1, group.state_bytes), torch.uint8, self._device)
            self._rows[index] = rows
            at = 0
            for layer in group.layers:
                self.layers[layer] = tuple(_views(rows, at, specs[layer]))
                at += state_bytes([specs[layer]])

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def begin(self, slots: Sequence[int]) -> None:
        """Slots begin with zeros."""
        if self._rows and slots:
            index = row_index(slots, self._device)
            for rows in self._rows.values():
                rows.index_fill_(0, index, 0)

    def restore(self, restores: Ints, arenas: Sequence[Tensor]) -> None:
        """[n, 3] of (group, block, slot): the slot's states become the snapshot."""
        for group, blocks, slots in self._by_group(restores):
            copy_rows(arenas[group], blocks, self._rows[group], slots)

    def save(self, saves: Ints, arenas: Sequence[Tensor]) -> None:
        """[n, 3] of (group, slot, block): the slot's states become a snapshot."""
        for group, slots, blocks in self._by_group(saves):
            copy_rows(self._rows[group], slots, arenas[group], blocks)

    def _by_group(self, triples: Ints) -> Iterable[tuple[int, Tensor, Tensor]]:
        for group in sorted(set(triples[:, 0].tolist())):
            some = triples[triples[:, 0] == group]
            yield group, row_index(some[:, 1].tolist(), self._device), row_index(some[:, 2].tolist(), self._device)


def _tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


def _views(rows: Tensor, at: int, spec: StateSpec) -> Iterable[Tensor]:
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size_bytes = math.prod(shape) * dtype.itemsize
        yield rows[:, at : at + size_bytes].view(dtype).view(len(rows), *shape)
        at += _tensor_bytes(shape, dtype)
