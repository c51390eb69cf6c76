"""Text that is read while it arrives: readers are generators which pause where the text so far can't tell.

What a reader sees never depends on where the text was cut, and the tape keeps only what a marker could still begin
with, so all readers together take time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

__all__ = ["Markers", "Reading", "Tape"]

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""A reader: it pauses to wait for more text."""

_WHITE = re.compile(r"\s*")


class Markers:
    """Strings to look for together; where several begin at one place, the longest counts."""

    def __init__(self, markers: Iterable[str]) -> None:
        found = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        assert found, "no markers"
        self.firsts = frozenset(marker[0] for marker in found)
        """Their first characters."""
        self._any = re.compile("|".join(map(re.escape, found)))
        self._first = re.compile("[" + "".join(re.escape(char) for char in self.firsts) + "]")
        self._beginnings = {marker[:length] for marker in found for length in range(1, len(marker))}
        self._max_length = len(found[0])

    def find(self, text: str, start: int) -> tuple[int, str]:
        """(where, which) of the first one from `start` on; (-1, '') if there is none."""
        found = self._any.search(text, start)
        return (-1, "") if found is None else (found.start(), found[0])

    def here(self, text: str, start: int) -> str:
        """The one that stands at `start`; '' if none does."""
        found = self._any.match(text, start)
        return "" if found is None else found[0]

    def may_go_on(self, text: str, start: int) -> bool:
        """Whether the text from `start` to its end is the beginning of one, which more text may complete."""
        return len(text) - start < self._max_length and text[start:] in self._beginnings

    def held_from(self, text: str, start: int) -> int:
        """Where the end of the text begins that may be the beginning of one; the text's length if none does."""
        for found in self._first.finditer(text, max(start, len(text) - self._max_length + 1)):
            if self.may_go_on(text, found.start()):
                return found.start()
        return len(text)


class Tape:
    """The text of one output; one reader runs on it."""

    def __init__(self) -> None:
        self.text = ""
        """What is there and not consumed begins at `at`."""
        self.at = 0
        self.ended = False
        """Nothing comes any more."""
        self.num_scanned = 0
        """Characters looked at, for the tests of linear time."""

    @property
    def is_over(self) -> bool:
        """All of the output has been consumed."""
        return self.ended and self.at == len(self.text)

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0
        self.num_scanned += len(self.text)

    def until(self, markers: Markers, take: Callable[[str], None]) -> Reading[str]:
        """Hand the text up to the first marker to `take`, piece by piece; the marker is consumed and returned.

        '' is the end of the output.
        """
        while True:
            where, marker = markers.find(self.text, self.at)
            if where >= 0 and (self.ended or not markers.may_go_on(self.text, where)):
                self._give(where, take)
                self.at = where + len(marker)
                return marker
            if self.ended:
                self._give(len(self.text), take)
                return ""
            self._give(where if where >= 0 else markers.held_from(self.text, self.at), take)
            yield

    def one_of(self, markers: Markers) -> Reading[str]:
        """Consume and return the marker that stands here; '' if none does."""
        while True:
            if self.ended or (self.at < len(self.text) and not markers.may_go_on(self.text, self.at)):
                marker = markers.here(self.text, self.at)
                self.at += len(marker)
                return marker
            yield

    def peek(self) -> Reading[str]:
        """The next character, not consumed; '' at the end of the output."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def stands(self, markers: Markers) -> Reading[bool]:
        """Whether one of the markers comes next; nothing is consumed."""
        while True:
            if self.ended or (self.at < len(self.text) and not markers.may_go_on(self.text, self.at)):
                return bool(markers.here(self.text, self.at))
            yield

    def white(self) -> Reading[str]:
        """Consume white space; what it was."""
        parts: list[str] = []
        yield from self.run(_WHITE, parts.append)
        return "".join(parts)

    def run(self, pattern: re.Pattern[str], take: Callable[[str], None]) -> Reading[None]:
        """Hand what the pattern (`[...]*`) matches to `take`, however far it goes, piece by piece."""
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            self._give(found.end(), take)
            if self.at < len(self.text) or self.ended:
                return
            yield

    def char(self) -> str:
        """Consume the character that `peek` found."""
        self.at += 1
        return self.text[self.at - 1]

    def _give(self, end: int, take: Callable[[str], None]) -> None:
        if end > self.at:
            take(self.text[self.at : end])
            self.at = end
