"""Calls written as elements, with one element for each parameter: `<invoke name="f"><parameter name="x">1</...`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import STRING, named_parameters, sequence, tag, written
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers._values import Arguments, to_json
from headrace.server.parsers.port import Tool, Tree

__all__ = ["Elements"]

_NAME = re.compile(r'[^\s<>"|]*')
_KEY = re.compile(r'[^<>"\n]*')


@dataclass(frozen=True)
class Elements:
    """The spelling of one format."""

    section: str
    """What calls begin with; empty when `invoke` does."""
    section_end: str
    invoke: str
    """Up to the function's name."""
    invoke_name_end: str
    invoke_end: str
    parameter: str
    """Up to the parameter's name."""
    parameter_name_ends: tuple[tuple[str, bool | None], ...]
    """Behind the parameter's name, and whether the value is a string then; None leaves it to the schema."""
    parameter_end: str
    trims: bool = True
    """A line break at either end of a value belongs to the markup."""
    mark: str = ""
    """What is part of every marker and of no value."""

    @cached_property
    def _openings(self) -> Markers:
        return Markers((self.invoke, self.section_end))

    @cached_property
    def _in_section(self) -> Markers:
        return Markers((self.invoke, self.section_end, self.section))

    @cached_property
    def _in_call(self) -> Markers:
        return Markers((self.parameter, self.invoke_end, self.section_end, self.invoke))

    @cached_property
    def _name_end(self) -> Markers:
        return Markers((self.invoke_name_end,))

    @cached_property
    def _key_ends(self) -> Markers:
        return Markers(end for end, _ in self.parameter_name_ends)

    @cached_property
    def _value_ends(self) -> Markers:
        """A value without its end is ended by what can only come behind it, at the start of a line."""
        return Markers([*self._ends, f"\n{self.parameter_end}"] if self.trims else self._ends)

    @cached_property
    def _ends(self) -> list[str]:
        marks = (self.parameter, self.invoke_end)
        return [self.parameter_end, *(f"\n{mark}" for mark in marks)]

    def read(self, tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
        lead = [begin]
        marker = begin
        if begin != self.invoke:
            lead.append((yield from tape.white()))
            marker = yield from tape.one_of(self._openings)
            lead.append(marker)
        if marker != self.invoke:
            out.no_call("".join(lead))
            return
        while marker == self.invoke:
            marker = yield from self._call(tape, out, lead, tools)
            while marker in (self.section, self.invoke_end) and marker:
                marker = yield from tape.until(self._in_section, out.content)
            lead = [marker]

    def _call(self, tape: Tape, out: Output, lead: list[str], tools: Mapping[str, Tool]) -> Reading[str]:
        """One call, whose `invoke` is read; the marker behind it."""
        yield from tape.run(_NAME, lead.append)
        end = yield from tape.one_of(self._name_end)
        if not end or (name := lead[-1]) == self.invoke:
            out.no_call("".join(lead))
            return ""
        name = "".join(lead).rpartition(self.invoke)[2]
        out.begin_call(name)
        arguments = Arguments(out, tools.get(name))
        marker = yield from tape.until(self._in_call, out.content)
        while marker == self.parameter:
            marker = yield from self._parameter(tape, out, arguments)
        if not marker:
            return ""
        arguments.end()
        out.end_call()
        return marker

    def _parameter(self, tape: Tape, out: Output, arguments: Arguments) -> Reading[str]:
        """One parameter, whose begin is read; the marker of the call behind it."""
        parts: list[str] = []
        yield from tape.run(_KEY, parts.append)
        end = yield from tape.one_of(self._key_ends)
        name = "".join(parts)
        if not end:
            out.content(self.parameter + name)
            return (yield from tape.until(self._in_call, out.content))
        kinds = arguments.kinds(name)
        is_string = dict(self.parameter_name_ends)[end]
        arguments.key(name)
        if self.trims:
            yield from tape.one_of(_LINE_BREAK)
        if kinds == STRING or (is_string and (not kinds or "string" in kinds)):
            arguments.quote()
            marker = yield from tape.until(self._value_ends, arguments.piece)
            if marker:
                arguments.quote()
        else:
            value: list[str] = []
            marker = yield from tape.until(self._value_ends, value.append)
            text = "".join(value)
            arguments.raw(to_json(text, kinds) if marker else text)
        if marker.removeprefix("\n") == self.parameter_end:
            return (yield from tape.until(self._in_call, out.content))
        return marker.removeprefix("\n")

    def tree(self, tool: Tool, *, begin: str = "", end: str = "", line: str = "\n") -> Tree:
        """The tag of one call, with `begin` and `end` around it and `line` between its elements."""

        def parameter(name: str, schema: Mapping[str, Any]) -> Tree:
            value = written(schema, *([self.mark] if self.mark else self._ends))
            is_text = value["type"] != "json_schema"
            name_end = next(
                each for each, is_string in self.parameter_name_ends if is_string is None or is_string == is_text
            )
            around = line if self.trims else ""
            return tag(f"{self.parameter}{name}{name_end}{around}", value, f"{around}{self.parameter_end}{line}")

        return tag(
            f"{begin}{self.invoke}{tool.name}{self.invoke_name_end}{line}",
            sequence(named_parameters(tool, parameter)),
            f"{self.invoke_end}{end}",
        )


_LINE_BREAK = Markers(("\n",))
