"""The slot table: what changes every step for every active request, as arrays by slot.

A step touches thousands of rows; arrays keep plan and commit linear with a small constant
(targets.md H1), objects are visited only when something happens to them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.scheduler.request import Active
from headrace.seam import Ints

NO_TOKEN = -1


def _nobody(token: int) -> None:
    raise AssertionError("a slot with rows in flight has an owner")


class SlotTable:
    """Slots of one section. `by_slot[s]` owns slot s from admission until its last row is committed."""

    def __init__(self, num_slots: int) -> None:
        self.by_slot: list[Active | None] = [None] * num_slots
        self.append: list[Callable[[int], None]] = [_nobody] * num_slots
        """The owner's `tokens.append`: what a plain row of a commit calls, thousands of times a step."""
        self._free: list[int] = list(range(num_slots - 1, -1, -1))
        self.request_id = np.zeros(num_slots, np.int64)
        self.length = np.zeros(num_slots, np.int64)
        """Committed tokens, prompt included."""
        self.pending = np.zeros(num_slots, np.int64)
        """Most tokens that rows in flight can still add."""
        self.rows_in_flight = np.zeros(num_slots, np.int64)
        """Rows of any kind; the slot and its blocks are kept until it is zero."""
        self.samples_in_flight = np.zeros(num_slots, np.int64)
        """Sampling rows: each adds at least one token unless the slot is done."""
        self.capacity = np.zeros(num_slots, np.int64)
        """Tokens that the blocks held so far have room for."""
        self.max_len = np.zeros(num_slots, np.int64)
        self.min_len = np.zeros(num_slots, np.int64)
        self.commit_at = np.zeros(num_slots, np.int64)
        """Computed tokens at which the cache has something to do: a block is full, or one leaves the window."""
        self.generating = np.zeros(num_slots, np.bool_)
        """The prompt is planned through and the request goes on: a generation row may be planned."""
        self.last_step = np.zeros(num_slots, np.int64)
        self.stop_ids: Ints = np.full((num_slots, 1), NO_TOKEN, np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, active: Active, *, min_len: int) -> int:
        slot = self._free.pop()
        active.slot = slot
        request = active.request
        self.by_slot[slot] = active
        self.append[slot] = active.tokens.append
        self.request_id[slot] = request.id
        self.length[slot] = len(active.tokens)
        self.pending[slot] = 0
        self.rows_in_flight[slot] = 0
        self.samples_in_flight[slot] = 0
        self.capacity[slot] = 0
        self.max_len[slot] = active.limit
        self.min_len[slot] = min_len
        self.commit_at[slot] = 0
        self.generating[slot] = False
        self._set_stops(slot, request.stop_ids)
        return slot

    def take_bare(self, active: Active) -> int:
        """A further slot for a beam of `active`; nothing in the arrays is its own."""
        slot = self._free.pop()
        self.by_slot[slot] = active
        return slot

    def give_back(self, slot: int) -> None:
        assert self.by_slot[slot] is not None
        self.by_slot[slot] = None
        self.append[slot] = _nobody
        self.max_len[slot] = 0
        self.capacity[slot] = 0
        self.generating[slot] = False
        self._free.append(slot)

    def _set_stops(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((self.stop_ids.shape[0], len(stop_ids)), NO_TOKEN, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def actives(self) -> list[Active]:
        """Each active request once, whatever number of beams it has."""
        return [active for slot, active in enumerate(self.by_slot) if active is not None and active.slot == slot]

    def may_generate(self, *, chained: bool) -> NDArray[np.int64]:
        """Slots for which a generation row makes sense now, in slot order.

        Every row in flight adds at least one token, so a slot that reaches its limit with what is
        in flight needs no further row. Unchained: only slots with nothing in flight (pipeline stages).
        """
        wanted = self.generating & (self.length + self.samples_in_flight < self.max_len)
        if not chained:
            wanted &= self.samples_in_flight == 0
        return np.flatnonzero(wanted)
