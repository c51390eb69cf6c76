"""Llama 3.1 to 3.3: the answer is a JSON object with `name` and `parameters`, maybe behind `<|python_tag|>`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from headrace.server.parsers._json import CallObjects, JsonReader
from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import arguments_of, tag
from headrace.server.parsers._tape import Reading, Tape
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Tool, Tree

__all__ = ["FORMAT"]

_TAG = "<|python_tag|>"
_MARKED = CallObjects(JsonReader())
_BARE = CallObjects(JsonReader(), known_only=True)


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    """An object that names no tool is a JSON answer, unless the marker says otherwise."""
    if not (yield from (_MARKED if begin else _BARE).read(tape, out, begin, tools)):
        return
    yield from tape.white()
    if (yield from tape.peek()) == ";":
        tape.char()


def _tag(tool: Tool) -> Tree:
    return tag(f'{{"name": {json.dumps(tool.name)}, "parameters": ', arguments_of(tool), "}")


FORMAT = Format(
    calls=Calls(
        begins=(_TAG,),
        at_start="{",
        read=_read,
        tags=CallTags(tag=_tag, separator="; ", trigger='{"name": '),
        tokens=(_TAG,),
    ),
    tool_signs=Signs(template=('{"name": function name, "parameters":',)),
    source=(
        "meta-llama/Llama-3.1-8B-Instruct model card and chat template",
        "meta-llama/llama-models, models/llama3_1/prompt_format.md",
    ),
)
