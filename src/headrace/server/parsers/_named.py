"""Calls written as a header that names the function, then its arguments as one JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from headrace.server.parsers._json import JsonReader, read_arguments
from headrace.server.parsers._output import Output
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import Tool

__all__ = ["NamedJson"]

_HEADER = re.compile(r"[^\s<{]*")


def _only_name(header: str) -> tuple[str, str]:
    return header, ""


@dataclass(frozen=True)
class NamedJson:
    """The spelling of one format; its markers can't be part of ordinary text."""

    section: str
    """Before the first call."""
    section_end: str
    call: str
    """Before a header."""
    call_end: str
    """Behind the arguments."""
    separator: str
    """Between header and arguments."""
    prefix: str = ""
    """Before the header."""
    closer: str = ""
    """Behind the arguments where the separator has opened something."""
    name_of: Callable[[str], tuple[str, str]] = _only_name
    """Name and id ('' if it says none) of a header."""

    @cached_property
    def _inside(self) -> Markers:
        return Markers((self.call, self.call_end, self.section_end))

    @cached_property
    def _between(self) -> Markers:
        return Markers((self.call, self.call_end, self.section_end, self.section))

    @cached_property
    def _json(self) -> JsonReader:
        return JsonReader(self._inside, hard=True)

    @cached_property
    def _single(self) -> dict[str, Markers]:
        return {text: Markers((text,)) for text in (self.prefix, self.separator, self.closer) if text}

    def read(self, tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
        lead = [begin]
        marker = begin
        if begin == self.section:
            lead.append((yield from tape.white()))
            marker = yield from tape.one_of(self._inside)
            lead.append(marker)
            if marker != self.call:
                out.no_call("".join(lead))
        while marker == self.call:
            if not (yield from self._call(tape, out, lead)):
                return
            marker = self.call_end
            while marker in (self.call_end, self.section) and marker:
                marker = yield from tape.until(self._between, out.content)
            lead = [marker]

    def _call(self, tape: Tape, out: Output, lead: list[str]) -> Reading[bool]:
        """One call, whose begin is read; False: it was none, and is content now."""
        name, call_id = yield from self._header(tape, lead)
        if not name:
            out.no_call("".join(lead))
            return False
        out.begin_call(name, call_id)
        is_whole = yield from read_arguments(tape, out, self._json)
        if is_whole and self.closer:
            yield from tape.white()
            yield from tape.one_of(self._single[self.closer])
        if is_whole or not tape.is_over:
            out.end_call()
        return True

    def _header(self, tape: Tape, lead: list[str]) -> Reading[tuple[str, str]]:
        lead.append((yield from tape.white()))
        if self.prefix:
            lead.append((yield from tape.one_of(self._single[self.prefix])))
            if not lead[-1]:
                return "", ""
        parts: list[str] = []
        yield from tape.run(_HEADER, parts.append)
        lead += parts
        lead.append((yield from tape.one_of(self._single[self.separator])))
        return self.name_of("".join(parts)) if lead[-1] else ("", "")
