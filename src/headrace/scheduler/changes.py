"""What the engine has to be told with the next plan besides its rows: slots, tables, and what the cache moves."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.kvcache.manager import KvCache
from headrace.scheduler.external import NoExternal
from headrace.seam import NO_INTS, Ints, SlotInit, int_rows, ints


class Changes:
    """Collects changes between two plans."""

    def __init__(self, kv: KvCache, external: NoExternal) -> None:
        self.kv = kv
        self.external = external
        self._no_blocks = tuple(int_rows((), 3) for _ in kv.groups)
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

    def changed_each(self, owners: Iterable[int], slots: Iterable[int]) -> None:
        self._changed.update(zip(owners, slots, strict=True))

    def forget(self, owner: int) -> None:
        """The owner's table is gone before the engine heard of its blocks."""
        self._changed.pop(owner, None)

    def take_freed(self) -> Ints:
        if not self._freed:
            return NO_INTS
        freed, self._freed = self._freed, []
        return ints(freed)

    def take_inits(self) -> tuple[SlotInit, ...]:
        inits, self._inits = self._inits, []
        return tuple(inits)

    def take_blocks(self) -> tuple[Ints, ...]:
        """[n, 3] of (slot, index, block) by group."""
        if not self._changed:
            return self._no_blocks
        flat = self.kv.take_new_blocks(self._changed)
        self._changed.clear()
        return tuple([ints(triples).reshape(-1, 3) for triples in flat])  # pyright: ignore[reportUnknownMemberType]
