"""How long blocks are worth keeping: priorities by range of the prompt, and when they end."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from headrace.types import DEFAULT_PRIORITY, Retention


def priority_of(retention: Retention | None, *, prompt_len: int, start: int, end: int) -> tuple[int, float | None]:
    """Priority (0 goes first, 100 last) of the block of tokens [start, end), and for how many seconds; None: for ever.

    The range that holds the block's first token gives it, also to tokens of the block that are beyond the range; a
    range that begins inside the block gives it nothing. So a block counts as decoded only when it has no prompt token.
    Ranges of a validated request don't overlap; where they do, the first one given wins.
    """
    assert start < end, (start, end)
    if retention is None:
        return DEFAULT_PRIORITY, None
    if start >= prompt_len:
        return retention.decode_priority, retention.decode_duration_s
    for part in retention.ranges:
        if part.start <= start and (part.end is None or start < part.end):
            return part.priority, part.duration_s
    return DEFAULT_PRIORITY, None


class Expiry:
    """The blocks whose priority ends. A block has one deadline: the last one given. Ties end in the order given."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int]] = []
        """(deadline, serial, group, block); an entry that is no longer the block's own is skipped."""
        self._own: dict[tuple[int, int], tuple[int, int]] = {}
        """By (group, block): (serial, node)."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._own)

    def add(self, deadline_s: float, group: int, block: int, node: int) -> None:
        self._serial += 1
        self._own[group, block] = self._serial, node
        heappush(self._heap, (deadline_s, self._serial, group, block))
        if len(self._heap) > 2 * len(self._own) + 64:
            self._compact()

    def remove(self, group: int, block: int) -> None:
        """The block has another name, or none, or a priority that doesn't end."""
        self._own.pop((group, block), None)

    def due(self, now_s: float) -> list[tuple[int, int, int]]:
        """(group, block, node) of those whose time is over, the longest over first; each is told once.

        The caller checks that the block is still that node's, where it doesn't call `remove`.
        """
        over: list[tuple[int, int, int]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, serial, group, block = heappop(self._heap)
            own = self._own.get((group, block))
            if own is not None and own[0] == serial:
                del self._own[group, block]
                over.append((group, block, own[1]))
        return over

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._own.get(entry[2:], (0, 0))[0] == entry[1]]
        heapify(self._heap)
