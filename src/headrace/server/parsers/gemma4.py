"""Gemma 4: reasoning in the channel `thought`, calls in a notation of their own between special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import (
    ARRAY,
    OBJECT,
    STRING,
    any_text,
    inner_schema,
    json_of,
    kinds_of,
    listed_parameters,
    tag,
    written,
)
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = Markers(("call:",))
_ENDS = Markers((_END,))
_QUOTES = Markers((_QUOTE,))
_STRING_ENDS = Markers((_QUOTE, _END))
_NAME = re.compile(r"[^\s{}<:]*")
_KEY = re.compile(r"[^{}\[\],:<]*")
_SCALAR = re.compile(r"[^{}\[\],<]*")
_WORDS = frozenset({"true", "false", "null"})
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    lead = [begin, (yield from tape.white()), (yield from tape.one_of(_CALL))]
    name: list[str] = []
    if lead[-1]:
        yield from tape.run(_NAME, name.append)
    lead += name
    if not name or (yield from tape.peek()) != "{":
        out.no_call("".join(lead))
        return
    out.begin_call("".join(name))
    is_whole = yield from _value(tape, out)
    if is_whole:
        out.end_call()
        yield from tape.white()
        yield from tape.one_of(_ENDS)
        return
    if (yield from tape.until(_ENDS, out.content)):
        out.end_call()


def _value(tape: Tape, out: Output) -> Reading[bool]:
    """A value with what it holds, as JSON; False where the notation is broken."""
    closers: list[str] = []
    """Of the objects and lists that are open."""
    while True:
        yield from tape.white()
        char = yield from tape.peek()
        if not char or (yield from tape.stands(_ENDS)):
            return False
        if char in "{[":
            out.arguments(tape.char())
            closers.append("}" if char == "{" else "]")
            if not (yield from _next_item(tape, out, closers, is_first=True)):
                return False
        elif not (yield from _scalar(tape, out)) or not (yield from _next_item(tape, out, closers, is_first=False)):
            return False
        if not closers:
            return True


def _next_item(tape: Tape, out: Output, closers: list[str], *, is_first: bool) -> Reading[bool]:
    """From behind an item (or an opening brace) to the value of the next one; nothing is open when it was the last."""
    while closers:
        yield from tape.white()
        char = yield from tape.peek()
        if char == closers[-1]:
            out.arguments(tape.char())
            closers.pop()
            is_first = False
            continue
        if char == ",":
            tape.char()
            yield from tape.white()
            char = yield from tape.peek()
            if char == closers[-1]:
                continue
        elif not is_first:
            return False
        if not char:
            return False
        out.arguments("" if is_first else ", ")
        return (yield from _key(tape, out)) if closers[-1] == "}" else True
    return True


def _key(tape: Tape, out: Output) -> Reading[bool]:
    parts: list[str] = []
    if (yield from tape.one_of(_QUOTES)):
        if (yield from tape.until(_STRING_ENDS, parts.append)) != _QUOTE:
            return False
    else:
        yield from tape.run(_KEY, parts.append)
    key = "".join(parts).strip().strip('"')
    yield from tape.white()
    if (yield from tape.peek()) != ":":
        out.content(key)
        return False
    tape.char()
    out.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
    return True


def _scalar(tape: Tape, out: Output) -> Reading[bool]:
    if (yield from tape.one_of(_QUOTES)):
        out.arguments('"')
        end = yield from tape.until(_STRING_ENDS, lambda text: out.arguments(_escaped(text)))
        if end:
            out.arguments('"')
        return end == _QUOTE
    parts: list[str] = []
    yield from tape.run(_SCALAR, parts.append)
    text = "".join(parts).strip()
    if text.lower() in _WORDS:
        text = text.lower()
    elif text == "None":
        text = "null"
    elif not _NUMBER.fullmatch(text):
        text = f'"{_escaped(text.strip(chr(34)))}"' if text else ""
    out.arguments(text)
    return bool(text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _tree(schema: Mapping[str, Any]) -> Tree:
    """A value in the notation; objects and lists of unknown members are left to strings and numbers."""
    kinds = kinds_of(schema)
    if kinds == STRING:
        return tag(_QUOTE, written(schema, _QUOTE, _END), _QUOTE)
    if kinds == OBJECT:
        return tag("{", listed_parameters(Tool("", dict(schema)), _parameter, separator=","), "}")
    if kinds == ARRAY:
        item = _tree(inner_schema(schema.get("items")))
        more: Tree = {"type": "star", "content": {"type": "sequence", "elements": [_const(","), item]}}
        some: Tree = {"type": "sequence", "elements": [item, more]}
        return tag("[", some if schema.get("minItems") else {"type": "optional", "content": some}, "]")
    if kinds and kinds <= {"integer", "number", "boolean", "null"}:
        return json_of(schema)
    return {"type": "or", "elements": [tag(_QUOTE, any_text(_QUOTE, _END), _QUOTE),
            json_of({"type": ["number", "boolean", "null"]})]}  # fmt: skip


def _const(value: str) -> Tree:
    return {"type": "const_string", "value": value}


def _parameter(name: str, schema: Mapping[str, Any]) -> Tree:
    return {"type": "sequence", "elements": [_const(f"{name}:"), _tree(schema)]}


def _tag(tool: Tool) -> Tree:
    return tag(f"{_BEGIN}call:{tool.name}{{", listed_parameters(tool, _parameter, separator=","), f"}}{_END}")


FORMAT = Format(
    thinking=Thinking(begin="<|channel>thought", end="<channel|>", tokens=("<|channel>", "<channel|>"), anywhere=True),
    calls=Calls(
        begins=(_BEGIN,),
        read=_read,
        tags=CallTags(tag=_tag, trigger=_BEGIN),
        tokens=(_BEGIN, _END, _QUOTE),
        ends_reasoning=True,
    ),
    reasoning_signs=Signs(template=("<|channel>thought",)),
    tool_signs=Signs(template=(_BEGIN, _QUOTE)),
    source=(
        "google/gemma-4 chat template; ai.google.dev, 'Gemma 4 prompt formatting' and 'Function calling with Gemma 4'",
        "vLLM documentation, parser/gemma4",
    ),
)
