"""The waiting queue: first come first served, or by priority; held requests stand aside."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from headrace.scheduler.request import Waiting


class WaitingQueue:
    """Requests in the order in which they may be admitted.

    A preempted request keeps its arrival number, so it comes back before everything that arrived
    after it. Held requests (waiting for a grammar, an adapter, ...) are swept for time-outs like
    the others but never block those behind them.
    """

    def __init__(self, *, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._keys: list[tuple[float, int]] = []
        self._items: list[Waiting] = []
        self._held: dict[int, Waiting] = {}
        self._ids: dict[int, Waiting] = {}
        self._timed: dict[int, Waiting] = {}
        """Those with a deadline of their own or of a hold: what a sweep has to look at."""

        self._num_arrivals = 0

    def next_order(self) -> int:
        """The arrival number of a new request."""
        self._num_arrivals += 1
        return self._num_arrivals - 1

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Waiting]:
        """Requests that may be admitted, in order."""
        return iter(self._items)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._ids

    @property
    def num_ready(self) -> int:
        return len(self._items)

    def _key(self, waiting: Waiting) -> tuple[float, int]:
        return (-waiting.request.priority if self._by_priority else 0.0, waiting.order)

    def push(self, waiting: Waiting) -> None:
        self._ids[waiting.request.id] = waiting
        if waiting.holds or waiting.request.timeout_s is not None:
            self._timed[waiting.request.id] = waiting
        if waiting.holds:
            self._held[waiting.request.id] = waiting
            return
        key = self._key(waiting)
        if not self._keys or key > self._keys[-1]:
            self._keys.append(key)
            self._items.append(waiting)
            return
        index = bisect.bisect(self._keys, key)
        self._keys.insert(index, key)
        self._items.insert(index, waiting)

    def remove(self, request_id: int) -> Waiting | None:
        waiting = self._ids.pop(request_id, None)
        if waiting is None:
            return None
        self._timed.pop(request_id, None)
        if self._held.pop(request_id, None) is None:
            index = bisect.bisect_left(self._keys, self._key(waiting))
            del self._keys[index], self._items[index]
        return waiting

    def remove_many(self, taken: list[Waiting]) -> None:
        """Drop admitted requests: one pass when they stand at the head, as they mostly do."""
        if not taken:
            return
        count = len(taken)
        if self._items[:count] == taken:
            del self._keys[:count], self._items[:count]
            for waiting in taken:
                del self._ids[waiting.request.id]
                self._timed.pop(waiting.request.id, None)
            return
        for waiting in taken:
            self.remove(waiting.request.id)

    def release(self, request_id: int, kind: str) -> None:
        """What the request waited for is there."""
        waiting = self._ids.get(request_id)
        if waiting is None or kind not in waiting.holds:
            return
        del waiting.holds[kind]
        if not waiting.holds:
            del self._held[request_id]
            self.push(waiting)

    def set_aside(self, waiting: Waiting, kind: str, deadline_s: float) -> None:
        """A request that was ready waits for something."""
        self.remove(waiting.request.id)
        waiting.hold(kind, deadline_s)
        self.push(waiting)

    def overdue(self, now_s: float) -> list[tuple[Waiting, str]]:
        """Requests whose own deadline or a hold's has passed: (request, "" or the hold's kind)."""
        late: list[tuple[Waiting, str]] = []
        for waiting in self._timed.values():
            if waiting.deadline_s <= now_s:
                late.append((waiting, ""))
                continue
            for kind, deadline_s in waiting.holds.items():
                if deadline_s <= now_s:
                    late.append((waiting, kind))
                    break
        return late
