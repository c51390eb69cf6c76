"""What the engine has to be told with the next plan besides its rows: slots, blocks, copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headrace.kvcache.manager import KvCache
from headrace.seam import Ints, Section, SlotInit, int_rows, ints


class Changes:
    """Collects changes between two plans; owns the leases of copies until the engine reports them done."""

    def __init__(self, kv: KvCache, *, index: int, num_sections: int) -> None:
        """Args: index, num_sections: copy ids count in strides, so that they are unique over sections."""
        self._kv = kv
        self._freed: list[int] = []
        self._inits: list[SlotInit] = []
        self._grown: dict[int, int] = {}
        """Owners whose table gained blocks -> their slot."""
        self._copies: list[tuple[int, int, int, int, int, int]] = []
        self._leases: dict[int, tuple[int, int, int]] = {}
        self._next_copy_id = index
        self._stride = num_sections

    def begin(self, init: SlotInit) -> None:
        self._inits.append(init)

    def free(self, slots: Iterable[int]) -> None:
        self._freed.extend(slots)

    def grew(self, owner: int, slot: int) -> None:
        self._grown[owner] = slot

    def forget(self, owner: int) -> None:
        """The owner's table is gone before the engine heard of its blocks."""
        self._grown.pop(owner, None)

    def copy(self, group: int, source: int, destination: int) -> None:
        """Both ends are leased from now on: whoever asked for the copy may be gone before it is planned."""
        copy_id = self._next_copy_id
        self._next_copy_id += self._stride
        self._kv.lease(group, source)
        self._kv.lease(group, destination)
        self._leases[copy_id] = (group, source, destination)
        self._copies.append((copy_id, group, 0, source, 0, destination))

    @property
    def copies_in_flight(self) -> bool:
        return bool(self._leases)

    def finish_copies(self, copy_ids: Iterable[int]) -> None:
        """Copies that the engine reports done; those of other sections are not ours."""
        for copy_id in copy_ids:
            if copy_id in self._leases:
                group, source, destination = self._leases.pop(copy_id)
                self._kv.unlease(group, source)
                self._kv.unlease(group, destination)

    def put_into(self, section: Section) -> Section:
        """The section with everything collected, which is then forgotten."""
        told = dataclasses.replace(
            section,
            blocks=self._new_blocks(),
            freed_slots=ints(self._freed),
            inits=tuple(self._inits),
            copies=int_rows(self._copies, 6),
        )
        self._freed, self._inits, self._copies, self._grown = [], [], [], {}
        return told

    def _new_blocks(self) -> tuple[Ints, ...]:
        """(slot, index, block) by group."""
        triples: list[list[tuple[int, int, int]]] = [[] for _ in self._kv.groups]
        for owner, slot in self._grown.items():
            for group, blocks in enumerate(self._kv.take_new_blocks(owner)):
                triples[group].extend((slot, index, block) for index, block in blocks)
        return tuple(int_rows(group, 3) for group in triples)
