"""The machine of all formats: what to look for comes from a `Format`, the rest is here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from headrace.server.parsers._output import Output, random_id
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import Calls, Event, Format, Thinking, Tool

__all__ = ["Machine"]


class Machine:
    """The `OutputParser` of one sequence."""

    def __init__(
        self,
        *,
        thinking: Format | None = None,
        calls: Format | None = None,
        tools: Mapping[str, Tool] | None = None,
        is_open: bool = False,
    ) -> None:
        """`thinking` and `calls` are read as their formats say; None leaves that part in the content.

        `is_open`: the output begins inside the reasoning. Without `tools` nothing is a call.
        """
        new_id = calls.calls.new_id if calls and calls.calls else None
        self.out = Output(new_id or random_id)
        self.tape = Tape()
        whole = next((each.whole for each in (thinking, calls) if each is not None and each.whole), None)
        if whole is not None:
            self._reading = whole(self.tape, self.out, tools if calls else None, is_open)
        else:
            self._reading = _read(
                self.tape,
                self.out,
                thinking.thinking if thinking else None,
                calls.calls if calls and tools is not None else None,
                tools or {},
                is_open,
            )
        self._go_on()

    @property
    def is_reasoning(self) -> bool:
        return self.out.in_reasoning

    def push(self, text: str) -> list[Event]:
        self.tape.add(text)
        self._go_on()
        return self.out.take()

    def finish(self) -> list[Event]:
        self.tape.ended = True
        self._go_on()
        self.out.finish()
        return self.out.take()

    def _go_on(self) -> None:
        next(self._reading, None)
        assert not self.tape.ended or self.tape.is_over


def _read(
    tape: Tape,
    out: Output,
    thinking: Thinking | None,
    calls: Calls | None,
    tools: Mapping[str, Tool],
    is_open: bool,
) -> Reading[None]:
    """Reasoning and calls that markers tell apart."""
    begins = (*((thinking.begin,) if thinking else ()), *(calls.begins if calls else ()))
    markers = _markers(begins) if begins else None
    if is_open and thinking is not None:
        yield from _reasoning(tape, out, thinking, calls, tools)
    while not tape.is_over:
        if calls is not None and calls.at_start and out.is_fresh:
            white = yield from tape.white()
            char = yield from tape.peek()
            if char and char in calls.at_start:
                out.content(white)
                yield from calls.read(tape, out, "", tools)
                continue
            out.content(white)
        if markers is None:
            yield from _rest(tape, out)
            return
        marker = yield from tape.until(markers, out.content)
        if thinking is not None and marker == thinking.begin:
            if out.is_fresh or thinking.anywhere:
                yield from _reasoning(tape, out, thinking, calls, tools)
            else:
                out.content(marker)
        elif marker and calls is not None:
            yield from calls.read(tape, out, marker, tools)


def _reasoning(
    tape: Tape, out: Output, thinking: Thinking, calls: Calls | None, tools: Mapping[str, Tool]
) -> Reading[None]:
    """Up to its end, or to a call that ends it. A begin that the prompt has already written may come again."""
    out.end_part()
    out.in_reasoning = True
    yield from tape.white()
    yield from tape.one_of(_markers((thinking.begin,)))
    ends_at_calls = calls is not None and calls.ends_reasoning
    ends = _markers((thinking.end, *(calls.begins if calls and ends_at_calls else ())))
    while out.in_reasoning:
        marker = yield from tape.until(ends, out.reasoning)
        if not marker:
            return
        if marker == thinking.end:
            out.in_reasoning = False
            out.end_part()
        elif calls is not None:
            yield from calls.read(tape, out, marker, tools)


@cache
def _markers(markers: tuple[str, ...]) -> Markers:
    return Markers(markers)


def _rest(tape: Tape, out: Output) -> Reading[None]:
    while not tape.is_over:
        out.content(tape.text[tape.at :])
        tape.at = len(tape.text)
        yield
