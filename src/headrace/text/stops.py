"""Stop strings in a stream of text.

Aho and Corasick, "Efficient string matching: an aid to bibliographic search" (1975): one automaton for all strings, one
transition a character, whatever the length of the output and nearly whatever the number of strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["StopChecker"]


class _Automaton:
    """States are prefixes of stop strings; state 0 is the empty one."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.fallback: list[int] = [0]
        """The longest proper suffix of the state that is a prefix of a stop string."""
        self.match: list[str] = [""]
        """The longest stop string that ends here, or ''."""
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The longest suffix of (text so far + character) that is a prefix of a stop string."""
        while state and character not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.fallback.append(0)
                self.match.append("")
            state = following
        self.match[state] = string

    def _link(self) -> None:
        """Breadth first, so that the fallback of each state is complete before its children need it."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.match[state] = self.match[state] or self.match[self.fallback[state]]
            for character, following in self.next[state].items():
                self.fallback[following] = self.step(self.fallback[state], character)
                queue.append(following)


class StopChecker:
    """Finds the first stop string in text that arrives in pieces, and gives out no character of it.

    The first match is the one that is complete first; of several that end at the same character, the longest. It does
    not depend on how the text is cut into pieces. With `include_stop_str` the stop string itself is given out too.

    Raises (constructor):
        ValueError: an empty stop string.
    """

    def __init__(self, stop_strings: Iterable[str], *, include_stop_str: bool = False) -> None:
        strings = tuple(dict.fromkeys(stop_strings))
        if "" in strings:
            raise ValueError("stop: a stop string is empty: leave it out")
        self.matched: str | None = None
        self._automaton = _Automaton(strings)
        self._has_strings = bool(strings)
        self._include_stop_str = include_stop_str
        self._state = 0
        self._held = ""
        """The end of the text so far that is a proper prefix of a stop string; empty with `include_stop_str`."""

    def push(self, delta: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text to give out, the stop string that was matched or None). After a match nothing more is given out.

        Text pushed with `armed=False` takes no part in a match, neither its beginning nor its end: it is given out
        whole, with what was held back before it.
        """
        if self.matched is not None:
            return "", self.matched
        text = self._held + delta
        if not armed or not self._has_strings:
            self._held, self._state = "", 0
            return text, None
        automaton, state = self._automaton, self._state
        for index, character in enumerate(delta):
            state = automaton.step(state, character)
            if automaton.match[state]:
                self.matched = automaton.match[state]
                end = len(self._held) + index + 1
                self._held = ""
                return text[: end if self._include_stop_str else end - len(self.matched)], self.matched
        self._state = state
        num_released = len(text) if self._include_stop_str else len(text) - automaton.depth[state]
        self._held = text[num_released:]
        return text[:num_released], None

    def flush(self) -> str:
        """What is held back, at the end of the text; '' after a match."""
        held, self._held = self._held, ""
        self._state = 0
        return held
