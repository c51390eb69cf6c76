"""What the engine has to be told with the next plan besides its rows: slots, tables, and what the cache moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headrace.kvcache.manager import KvCache
from headrace.seam import Ints, Section, SlotInit, int_rows, ints


class Changes:
    """Collects changes between two plans."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._freed: list[int] = []
        self._inits: list[SlotInit] = []
        self._changed: dict[int, int] = {}
        """Owners whose table gained blocks or lost some to the window -> their slot."""

    def begin(self, init: SlotInit) -> None:
        self._inits.append(init)

    def free(self, slots: Iterable[int]) -> None:
        self._freed.extend(slots)

    def changed(self, owner: int, slot: int) -> None:
        self._changed[owner] = slot

    def forget(self, owner: int) -> None:
        """The owner's table is gone before the engine heard of its blocks."""
        self._changed.pop(owner, None)

    def put_into(self, section: Section) -> Section:
        """The section with everything collected, which is then forgotten."""
        kv = self._kv
        told = dataclasses.replace(
            section,
            blocks=self._new_blocks(),
            freed_slots=ints(self._freed),
            inits=tuple(self._inits),
            copies=kv.take_copies(),
            transfers=kv.take_transfers(),
            restores=kv.take_restores(),
            saves=kv.take_saves(),
        )
        self._freed, self._inits, self._changed = [], [], {}
        return told

    def _new_blocks(self) -> tuple[Ints, ...]:
        """(slot, index, block) by group."""
        triples: list[list[tuple[int, int, int]]] = [[] for _ in self._kv.groups]
        for owner, slot in self._changed.items():
            for group, blocks in enumerate(self._kv.take_new_blocks(owner)):
                triples[group].extend((slot, index, block) for index, block in blocks)
        return tuple(int_rows(group, 3) for group in triples)
