"""`<tool_call>` around one JSON object, as Hermes and Qwen models write it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.server.parsers._json import CallObjects, JsonReader
from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import arguments_of, tag
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import CallTags, Tool, Tree

__all__ = ["TAGS", "read_calls"]

_BEGIN = "<tool_call>"
_END = Markers(("</tool_call>",))
_BRACES = Markers(("}", "]"))
_OBJECTS = CallObjects(JsonReader(_END))


def read_calls(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    if not (yield from _OBJECTS.read(tape, out, begin, tools)):
        return
    yield from tape.white()
    while (yield from tape.one_of(_BRACES)):  # one too many, now and then
        yield from tape.white()
    yield from tape.one_of(_END)


def _tag(tool: Tool) -> Tree:
    return tag(f'{_BEGIN}\n{{"name": {json.dumps(tool.name)}, "arguments": ', arguments_of(tool), "}\n</tool_call>")


TAGS = CallTags(tag=_tag, separator="\n", trigger=_BEGIN)
