"""Calls of GLM models: a name, then keys and values as elements of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import STRING, named_parameters, tag, written
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers._values import Arguments, to_json
from headrace.server.parsers.port import Calls, CallTags, Tool, Tree

__all__ = ["glm_calls"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<]*")
_PARTS = Markers((_KEY, _END))
_AFTER_KEY = Markers((_KEY_END, _VALUE, _END))
_VALUE_BEGIN = Markers((_VALUE,))
_ENDS = (_VALUE_END, _KEY, _END)
_VALUE_ENDS = Markers(_ENDS)


def glm_calls(line: str) -> Calls:
    """`line` stands between the parts of a call where a model writes it by the grammar; reading takes any."""

    def parameter(name: str, schema: Mapping[str, Any]) -> Tree:
        return tag(f"{_KEY}{name}{_KEY_END}{line}{_VALUE}", written(schema, *_ENDS), f"{_VALUE_END}{line}")

    def call(tool: Tool) -> Tree:
        return tag(f"{_BEGIN}{tool.name}{line}", named_parameters(tool, parameter), _END)

    return Calls(
        begins=(_BEGIN,),
        read=_read,
        tags=CallTags(tag=call, separator=line, trigger=_BEGIN),
        tokens=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
        ends_reasoning=True,
    )


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    lead = [begin, (yield from tape.white())]
    name: list[str] = []
    yield from tape.run(_NAME, name.append)
    lead += [*name, (yield from tape.white())]
    marker = yield from tape.one_of(_PARTS)
    if not name or not marker:
        out.no_call("".join(lead) + marker)
        return
    out.begin_call("".join(name))
    arguments = Arguments(out, tools.get("".join(name)))
    while marker == _KEY:
        marker = yield from _parameter(tape, out, arguments)
        if marker == _VALUE_END:
            marker = yield from tape.until(_PARTS, out.content)
    if marker:
        arguments.end()
        out.end_call()


def _parameter(tape: Tape, out: Output, arguments: Arguments) -> Reading[str]:
    """A key and its value; the marker that ended the value."""
    parts: list[str] = []
    marker = yield from tape.until(_AFTER_KEY, parts.append)
    key = "".join(parts).strip()
    if marker == _KEY_END:
        white = yield from tape.white()
        marker = yield from tape.one_of(_VALUE_BEGIN)
        if not marker:
            out.content(f"{key}{white}")
            return (yield from tape.until(_PARTS, out.content))
    if marker != _VALUE:
        out.content(key)
        return marker
    kinds = arguments.kinds(key)
    arguments.key(key)
    if kinds == STRING:
        arguments.quote()
        marker = yield from tape.until(_VALUE_ENDS, arguments.piece)
        if marker:
            arguments.quote()
        return marker
    value: list[str] = []
    marker = yield from tape.until(_VALUE_ENDS, value.append)
    text = "".join(value)
    arguments.raw(to_json(text, kinds) if marker else text)
    return marker
