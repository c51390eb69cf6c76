"""Where the reasoning of a sequence begins and ends, told from its tokens, and how much of it may still come."""

from __future__ import annotations

from collections import deque

from headrace.types import Marker, ThinkingCap

__all__ = ["Marked", "Thinking"]


class Marked:
    """Looks for a marker in the tokens of one sequence."""

    def __init__(self, marker: Marker) -> None:
        self._places = [frozenset(place) for place in marker]
        self._usual = [place[0] for place in marker]
        self._tail: deque[int] = deque(maxlen=len(marker))

    def push(self, token: int) -> bool:
        """One more token; whether it completes the marker."""
        self._tail.append(token)
        return bool(self._places) and self._fits(len(self._places))

    @property
    def num_matched(self) -> int:
        """How much of the marker stands at the end, not all of it."""
        longest = min(len(self._tail), len(self._places) - 1)
        return next((count for count in range(longest, 0, -1) if self._fits(count)), 0)

    @property
    def next_token(self) -> int:
        """What goes on with the marker, in its usual spelling."""
        return self._usual[self.num_matched]

    def forget(self) -> None:
        self._tail.clear()

    def _fits(self, count: int) -> bool:
        """Whether the last `count` tokens are the marker's first."""
        first = len(self._tail) - count
        return first >= 0 and all(self._tail[first + at] in self._places[at] for at in range(count))


class Thinking:
    """One sequence under a cap."""

    def __init__(self, cap: ThinkingCap) -> None:
        self.num_left = cap.max_tokens
        """Tokens of reasoning that may still come; negative while the end marker is written."""
        self._cap = cap
        self._begin = Marked(cap.begin)
        self._ends = [Marked(end) for end in cap.ends]
        self._blank = frozenset(cap.blank_ids)
        self._is_open = cap.is_open
        self._may_begin = bool(cap.begin)

    @property
    def is_over(self) -> bool:
        """No reasoning can come any more."""
        return not self._is_open and not self._may_begin

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any."""
        return self._ends[0].next_token if self._is_open and self.num_left <= 0 else None

    def push(self, token: int) -> None:
        """One more token of the output."""
        if self._is_open:
            self.num_left -= 1
            have_ended = [end.push(token) for end in self._ends]
            if any(have_ended):
                self._turn(is_open=False)
        elif self._may_begin:
            if self._begin.push(token):
                self._turn(is_open=True)
            elif not self._cap.is_anywhere:
                self._may_begin = token in self._blank or self._begin.num_matched > 0

    def _turn(self, *, is_open: bool) -> None:
        """The reasoning has begun or ended; an answer begins where it has ended."""
        self._is_open = is_open
        for marked in (self._begin, *self._ends):
            marked.forget()
