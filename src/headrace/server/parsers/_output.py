"""Where readers put what they found: the events of a machine, trimmed at the borders of its parts."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from headrace.server.parsers.port import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning

__all__ = ["Output", "random_id"]


def random_id(name: str, index: int) -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class _Part:
    """The text of reasoning or of content over the whole output."""

    def __init__(self, *, trims: bool) -> None:
        self.trims = trims
        """Leading white space isn't shown: something of another kind came before."""
        self.waiting: list[str] = []
        """White space that is shown once more of this part comes."""
        self.has_begun = False

    def show(self, text: str) -> list[str]:
        """What of this part is certain by now."""
        if self.trims:
            text = text.lstrip()
        if not text:
            return []
        shown = text.rstrip()
        if not shown:
            self.waiting.append(text)
            return []
        pieces = [*self.waiting, shown]
        self.waiting = [text[len(shown) :]] if len(shown) < len(text) else []
        self.trims, self.has_begun = False, True
        return pieces

    def cut(self) -> None:
        """Something of another kind comes."""
        self.trims = True
        if not self.has_begun:
            self.waiting = []


class Output:
    """White space between the parts (reasoning, content, calls) belongs to the markup and is left out.

    Inside a part nothing is: white space at its end waits until more of the part comes, and an output that holds
    content only keeps every character.
    """

    def __init__(self, new_id: Callable[[str, int], str] = random_id) -> None:
        self.in_reasoning = False
        """Where the machine stands, for who counts tokens."""
        self.num_calls = 0
        self.is_fresh = True
        """No content has come since the output began or its last call."""
        self._new_id = new_id
        self._events: list[Event] = []
        self._content = _Part(trims=False)
        self._reasoning = _Part(trims=True)
        self._open: type[Content] | type[Reasoning] | type[CallArguments] = Content
        """The kind of `_pieces`, which are to become one event."""
        self._pieces: list[str] = []

    def take(self) -> list[Event]:
        """What came since the last time, neighbours of one kind joined."""
        self._close()
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        if pieces := self._content.show(text):
            self.is_fresh = False
            self._put(Content, pieces)

    def reasoning(self, text: str) -> None:
        if pieces := self._reasoning.show(text):
            self._put(Reasoning, pieces)

    def no_call(self, text: str) -> None:
        """Text that looked like the beginning of a call and isn't one."""
        if self.in_reasoning:
            self.reasoning(text)
        else:
            self.content(text)

    def end_part(self) -> None:
        """The part that comes next is another one."""
        self._content.cut()
        self._reasoning.cut()

    def begin_call(self, name: str, call_id: str = "") -> None:
        self.end_part()
        self._close()
        self.in_reasoning = False
        index = self.num_calls
        self.num_calls += 1
        self.is_fresh = True
        self._events.append(CallBegin(index, name, call_id or self._new_id(name, index)))

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self._put(CallArguments, [text])

    def end_call(self) -> None:
        self._close()
        self._events.append(CallEnd(self.num_calls - 1))

    def finish(self) -> None:
        """The white space at the end of content, or of reasoning that was cut off."""
        kind, part = (Reasoning, self._reasoning) if self.in_reasoning else (Content, self._content)
        if part.waiting and not part.trims:
            self._put(kind, part.waiting)

    def _put(self, kind: type[Content] | type[Reasoning] | type[CallArguments], pieces: list[str]) -> None:
        if kind is not self._open:
            self._close()
            self._open = kind
        self._pieces += pieces

    def _close(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces = []
        if self._open is CallArguments:
            self._events.append(CallArguments(self.num_calls - 1, text))
        elif self._open is Reasoning:
            self._events.append(Reasoning(text))
        else:
            self._events.append(Content(text))
