"""JSON as models write it, read while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import Tool

__all__ = ["CallObjects", "JsonReader", "read_arguments"]

Take = Callable[[str], None]

_ESCAPES = frozenset('"\\/bfnrtu')
_SCALAR = re.compile(r"[^\s,:{}\[\]\"<|]*")
_NAMES = frozenset({"name", "function_name", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args", "input"})


class JsonReader:
    """Reads values and hands their text on as it is written, with line breaks and tabs inside of strings escaped.

    `enders` are markers that can't be part of the value: they end one that is broken, outside of strings everywhere,
    and inside of them if ordinary text can't spell them (`hard`) or if the string holds a line break, which a string
    of JSON can't.
    """

    def __init__(self, enders: Markers | None = None, *, hard: bool = False) -> None:
        self._enders = enders
        self._hard = hard
        firsts = "".join(map(re.escape, enders.firsts)) if enders else ""
        self._inside = re.compile(rf'[^"\\\x00-\x1f{firsts}]*')
        self._outside = re.compile(rf'[^"{{}}\[\]{firsts}]*')

    def value(self, tape: Tape, take: Take) -> Reading[bool]:
        """One value, which begins here; whether it is whole."""
        depth = 0
        while True:
            char = yield from tape.peek()
            if not char or (yield from self._ends(tape, char)):
                return False
            if char == '"':
                if not (yield from self.string(tape, take)):
                    return False
            elif char in "{[":
                take(tape.char())
                depth += 1
                continue
            elif char in "}]":
                if depth == 0:
                    return False
                take(tape.char())
                depth -= 1
            elif depth == 0:
                return (yield from self._scalar(tape, take))
            elif self._enders and char in self._enders.firsts:
                take(tape.char())
            else:
                yield from tape.run(self._outside, take)
            if depth == 0:
                return True

    def string(self, tape: Tape, take: Take) -> Reading[bool]:
        """A string, whose opening quote comes next; whether it is whole."""
        take(tape.char())
        is_broken = self._hard
        while True:
            yield from tape.run(self._inside, take)
            char = yield from tape.peek()
            if not char:
                return False
            if char == '"':
                take(tape.char())
                return True
            if char == "\\":
                yield from self._escape(tape, take)
            elif char < " ":
                is_broken = is_broken or char == "\n"
                take(json.dumps(tape.char())[1:-1])
            elif is_broken and (yield from self._ends(tape, char)):
                return False
            else:
                take(tape.char())

    def text(self, tape: Tape, raw: list[str]) -> Reading[str | None]:
        """What a string says, if one comes next and is whole; its spelling is added to `raw`."""
        if (yield from tape.peek()) != '"':
            return None
        parts: list[str] = []
        is_whole = yield from self.string(tape, parts.append)
        raw += parts
        return decoded_string("".join(parts)) if is_whole else None

    def _escape(self, tape: Tape, take: Take) -> Reading[None]:
        """An escape that JSON doesn't know is a backslash."""
        backslash = tape.char()
        char = yield from tape.peek()
        if char and char in _ESCAPES:
            take(backslash + tape.char())
        else:
            take(backslash + backslash if char else backslash)

    def _scalar(self, tape: Tape, take: Take) -> Reading[bool]:
        parts: list[str] = []
        yield from tape.run(_SCALAR, parts.append)
        take("".join(parts))
        return bool(parts)

    def _ends(self, tape: Tape, char: str) -> Reading[bool]:
        if self._enders is None or char not in self._enders.firsts:
            return False
        return (yield from tape.stands(self._enders))


def decoded_string(spelling: str) -> str | None:
    try:
        value: Any = json.loads(spelling)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def read_arguments(tape: Tape, out: Output, reader: JsonReader) -> Reading[bool]:
    """The arguments of the call that has begun, JSON or a string that holds JSON; whether they are whole."""
    yield from tape.white()
    if (yield from tape.peek()) != '"':
        return (yield from reader.value(tape, out.arguments))
    spelling: list[str] = []
    said = yield from reader.text(tape, spelling)
    out.arguments("".join(spelling) if said is None else said)
    return said is not None


class CallObjects:
    """Calls written as objects with the function's name and arguments: one, or a list of them.

    Text that turns out not to be a call before its name is known is content, markers included.
    """

    def __init__(self, reader: JsonReader, *, known_only: bool = False) -> None:
        """`known_only`: only an object that names one of the tools is a call."""
        self._json = reader
        self._known_only = known_only

    def read(self, tape: Tape, out: Output, before: str, tools: Mapping[str, Tool]) -> Reading[bool]:
        """Calls from here on; `before` is their marker. False: what came last was no call, and is content now."""
        lead = [before, (yield from tape.white())]
        is_list = (yield from tape.peek()) == "["
        if is_list:
            lead.append(tape.char())
        while True:
            lead.append((yield from tape.white()))
            if not (yield from self._one(tape, out, lead, tools)):
                return False
            if not is_list:
                return True
            yield from tape.white()
            char = yield from tape.peek()
            if char in ("]", ","):
                lead = [tape.char()]
            if char != ",":
                return True

    def _one(self, tape: Tape, out: Output, raw: list[str], tools: Mapping[str, Tool]) -> Reading[bool]:
        call = _Call(out, tools if self._known_only else None)
        is_read = False
        if (yield from tape.peek()) == "{":
            raw.append(tape.char())
            is_read = yield from self._members(tape, raw, call)
        if is_read and call.can_begin and not call.has_begun:
            call.arguments("{}")
        if call.has_begun:
            if call.is_whole or not tape.is_over:
                out.end_call()
            return True
        out.no_call("".join(raw))
        return False

    def _members(self, tape: Tape, raw: list[str], call: _Call) -> Reading[bool]:
        """The members of an object whose brace is read, and those of an object `function` in it; whether whole."""
        depth = 1
        while depth:
            raw.append((yield from tape.white()))
            char = yield from tape.peek()
            if char in ("}", ","):
                raw.append(tape.char())
                depth -= char == "}"
                continue
            key = yield from self._json.text(tape, raw)
            if key is None:
                return False
            raw.append((yield from tape.white()))
            if (yield from tape.peek()) != ":":
                return False
            raw += [tape.char(), (yield from tape.white())]
            if key == "function" and (yield from tape.peek()) == "{":
                raw.append(tape.char())
                depth += 1
            elif not (yield from self._member(tape, key, raw, call)):
                return False
        return True

    def _member(self, tape: Tape, key: str, raw: list[str], call: _Call) -> Reading[bool]:
        char = yield from tape.peek()
        if (key in _NAMES or key == "function") and not call.name:
            call.name = (yield from self._json.text(tape, raw)) or ""
            return call.may_begin()
        if key in _ARGUMENTS and not call.has_arguments:
            if char == '"':
                said = yield from self._json.text(tape, raw)
                if said is not None:
                    call.arguments(said)
                return said is not None
            if call.can_begin:
                call.begin()
                call.is_whole = yield from self._json.value(tape, call.out.arguments)
                return call.is_whole
            parts: list[str] = []
            is_whole = yield from self._json.value(tape, parts.append)
            raw += parts
            if is_whole:
                call.arguments("".join(parts))
            return is_whole
        return (yield from self._json.value(tape, raw.append))


class _Call:
    """What an object has said so far."""

    def __init__(self, out: Output, known: Mapping[str, Tool] | None) -> None:
        self.out = out
        self.name = ""
        self.has_begun = False
        self.is_whole = False
        """Its arguments are."""
        self._known = known
        self._waiting = ""

    @property
    def can_begin(self) -> bool:
        return bool(self.name) and (self._known is None or self.name in self._known)

    @property
    def has_arguments(self) -> bool:
        return self.has_begun or bool(self._waiting)

    def may_begin(self) -> bool:
        """The name has come: arguments that waited for it begin the call. False: it is no name of a tool."""
        if self.can_begin and self._waiting:
            self.arguments(self._waiting)
        return self.can_begin

    def begin(self) -> None:
        self.has_begun = True
        self.out.begin_call(self.name)

    def arguments(self, text: str) -> None:
        """All of them; they wait for the name."""
        if not self.can_begin:
            self._waiting = text
            return
        self.begin()
        self.out.arguments(text)
        self.is_whole = True
