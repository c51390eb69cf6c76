"""Llama 3.2 and 4, and others: the answer is a Python list of calls, `[f(x=1), g()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import json_of, listed_parameters, sequence, tag
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers._values import Arguments, to_json
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Tool, Tree

__all__ = ["FORMAT"]

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_ENDS = Markers((_END,))
_NAME = re.compile(r"[\w.\-]*")
_CODE = re.compile(r"[^'\"()\[\]{},]*")
_INSIDE = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    """A list whose first item isn't a call of one of the tools is content."""
    lead = [begin, (yield from tape.white())]
    is_list = (yield from tape.peek()) == "["
    if is_list:
        lead.append(tape.char())
    while is_list:
        lead.append((yield from tape.white()))
        name: list[str] = []
        yield from tape.run(_NAME, name.append)
        lead += [*name, (yield from tape.white())]
        if (yield from tape.peek()) != "(" or "".join(name) not in tools:
            break
        tape.char()
        out.begin_call("".join(name))
        if not (yield from _arguments(tape, out, tools["".join(name)])):
            if not tape.is_over:
                out.end_call()
            return
        out.end_call()
        yield from tape.white()
        char = yield from tape.peek()
        if char != "," and char != "]":
            return
        lead = [tape.char()]
        if char == "]":
            yield from tape.white()
            yield from tape.one_of(_ENDS)
            return
    out.no_call("".join(lead))


def _arguments(tape: Tape, out: Output, tool: Tool) -> Reading[bool]:
    """From behind the opening parenthesis to behind the closing one; whether it came."""
    arguments = Arguments(out, tool)
    while True:
        lead = [(yield from tape.white())]
        if (yield from tape.peek()) == ")":
            tape.char()
            arguments.end()
            return True
        name: list[str] = []
        yield from tape.run(_NAME, name.append)
        lead += [*name, (yield from tape.white())]
        if not name or (yield from tape.peek()) != "=":
            out.content("".join(lead))
            return False
        tape.char()
        key = "".join(name)
        arguments.key(key)
        source: list[str] = []
        is_whole = yield from _expression(tape, source)
        text = "".join(source).strip()
        arguments.raw(to_json(text, arguments.kinds(key)) if is_whole and text[:1] not in ("'", '"') else
                      _string(text) if is_whole else text)  # fmt: skip
        if not is_whole:
            return False
        if (yield from tape.peek()) == ",":
            tape.char()


def _expression(tape: Tape, source: list[str]) -> Reading[bool]:
    """The text of a value up to the comma or parenthesis behind it; whether that came."""
    closers: list[str] = []
    while True:
        yield from tape.run(_CODE, source.append)
        char = yield from tape.peek()
        if not char:
            return False
        if not closers and char in ",)":
            return True
        source.append(tape.char())
        if char in "'\"":
            if not (yield from _quoted(tape, source, char)):
                return False
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif closers and char == closers[-1]:
            closers.pop()


def _quoted(tape: Tape, source: list[str], quote: str) -> Reading[bool]:
    while True:
        yield from tape.run(_INSIDE[quote], source.append)
        char = yield from tape.peek()
        if not char:
            return False
        source.append(tape.char())
        if char == quote:
            return True
        if (yield from tape.peek()):
            source.append(tape.char())


def _string(text: str) -> str:
    """JSON of a Python string; of the text as it is where it isn't one."""
    import ast

    try:
        value: Any = ast.literal_eval(text.replace("\n", "\\n"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    return json.dumps(value if isinstance(value, str) else text, ensure_ascii=False)


def _parameter(name: str, schema: Mapping[str, Any]) -> Tree:
    return sequence({"type": "const_string", "value": f"{name}="}, json_of(schema))


def _tag(tool: Tool) -> Tree:
    return tag(f"{tool.name}(", listed_parameters(tool, _parameter, separator=", "), ")")


FORMAT = Format(
    calls=Calls(
        begins=(_BEGIN,),
        at_start="[",
        read=_read,
        tags=CallTags(tag=_tag, before="[", separator=", ", after="]", trigger="["),
        tokens=(_BEGIN, _END),
    ),
    tool_signs=Signs(template=("[func_name1(params_name1=params_value1",)),
    source=(
        "meta-llama/llama-models, models/llama3_2/text_prompt_format.md and models/llama4/prompt_format.md",
        "vLLM documentation, 'Tool Calling', 'Models with Pythonic Tool Calls'",
    ),
)
