"""Kimi K3: elements whose brackets are special tokens; reasoning, answer and calls are channels of a message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import json_of, kinds_of, named_parameters, tag, written
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers._values import Arguments, to_json
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_BRACKETS = Markers((_OPEN, _CLOSE))
_HEADER_ENDS = Markers((_SEP, _OPEN, _CLOSE))
_ATTRIBUTE = re.compile(r'([\w\-]+)="([^"]*)"')
_THINK, _CALL, _ARGUMENT, _TOOLS = "think", "call", "argument", "tools"
_ATTRIBUTES_OF: dict[str, frozenset[str]] = {
    "message": frozenset({"role"}),
    "think": frozenset(),
    "response": frozenset(),
    "tools": frozenset(),
    "call": frozenset({"tool", "index"}),
    "argument": frozenset({"key", "type"}),
}
_MAX_HEADER = 4096


class _Reader:
    """Where the output is: which elements are open doesn't matter, only what the last one was."""

    def __init__(self, tape: Tape, out: Output, tools: Mapping[str, Tool] | None) -> None:
        self._tape = tape
        self._out = out
        self._tools = tools
        self._arguments: Arguments | None = None
        """Of the call that is open."""

    def run(self, *, is_open: bool) -> Reading[None]:
        tape, out = self._tape, self._out
        out.in_reasoning = is_open
        while not tape.is_over:
            bracket = yield from tape.until(_BRACKETS, out.reasoning if out.in_reasoning else out.content)
            while bracket:
                bracket = yield from self._element(bracket)

    def _element(self, bracket: str) -> Reading[str]:
        """A tag, whose bracket is read; another bracket that came instead of its end."""
        tape, out = self._tape, self._out
        parts: list[str] = []
        end = yield from tape.until(_HEADER_ENDS, parts.append)
        header = "".join(parts)
        if end != _SEP or len(header) > _MAX_HEADER:
            out.no_call(f"{bracket}{header}{_SEP if end == _SEP else ''}")
            return "" if end == _SEP else end
        name = header.split(maxsplit=1)[0] if header.strip() else ""
        is_known = _is_known(bracket, name, header)
        if is_known and bracket == _OPEN and name == _ARGUMENT and self._arguments is not None:
            return (yield from self._argument(self._arguments, header))
        if not is_known or (name in (_CALL, _TOOLS, _ARGUMENT) and self._tools is None):
            out.no_call(f"{bracket}{header}{_SEP}")
        elif bracket == _OPEN:
            self._opened(name, header)
        else:
            self._closed(name)
        return ""

    def _opened(self, name: str, header: str) -> None:
        out = self._out
        self._end_call()
        out.end_part()
        out.in_reasoning = name == _THINK
        if name == _CALL and (function := _attributes(header).get("tool", "")):
            out.begin_call(function)
            self._arguments = Arguments(out, (self._tools or {}).get(function))

    def _closed(self, name: str) -> None:
        if name in (_CALL, _TOOLS):
            self._end_call()
        if name == _THINK:
            self._out.in_reasoning = False
        self._out.end_part()

    def _argument(self, arguments: Arguments, header: str) -> Reading[str]:
        out = self._out
        attributes = _attributes(header)
        key = attributes.get("key", "")
        kinds = arguments.kinds(key)
        arguments.key(key)
        if attributes.get("type", "string") == "string" and (not kinds or "string" in kinds):
            arguments.quote()
            bracket = yield from self._tape.until(_BRACKETS, arguments.piece)
            if bracket:
                arguments.quote()
            return bracket
        parts: list[str] = []
        bracket = yield from self._tape.until(_BRACKETS, parts.append)
        text = "".join(parts)
        out.arguments(to_json(text, kinds) if bracket else text)
        return bracket

    def _end_call(self) -> None:
        if self._arguments is not None:
            self._arguments.end()
            self._out.end_call()
            self._arguments = None


def _is_known(bracket: str, name: str, header: str) -> bool:
    """Whether this is a tag of the format: anything else is text."""
    attributes = _ATTRIBUTES_OF.get(name)
    if attributes is None or bracket == _CLOSE:
        return attributes is not None and header == name
    return header == name or (
        _attributes(header).keys() <= attributes and not _ATTRIBUTE.sub("", header)[len(name) :].strip()
    )


def _attributes(header: str) -> dict[str, str]:
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in _ATTRIBUTE.findall(header)}


def _whole(tape: Tape, out: Output, tools: Mapping[str, Tool] | None, is_open: bool) -> Reading[None]:
    return _Reader(tape, out, tools).run(is_open=is_open)


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    return _Reader(tape, out, tools).run(is_open=False)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _type_of(schema: Mapping[str, Any]) -> str:
    kinds = kinds_of(schema)
    kind = next(iter(kinds)) if len(kinds) == 1 else "object"
    return "number" if kind == "integer" else kind


def _parameter(name: str, schema: Mapping[str, Any]) -> Tree:
    kind = _type_of(schema)
    value = written(schema, _OPEN, _CLOSE) if kind == "string" else json_of(schema)
    return tag(f'{_OPEN}argument key="{_escaped(name)}" type="{kind}"{_SEP}', value, f"{_CLOSE}argument{_SEP}")


def _tag(tool: Tool) -> Tree:
    number: Tree = {"type": "regex", "pattern": '[0-9]{1,3}"'}
    body: Tree = {"type": "sequence", "elements": [
        number, {"type": "const_string", "value": _SEP}, named_parameters(tool, _parameter)
    ]}  # fmt: skip
    return tag(f'{_OPEN}call tool="{_escaped(tool.name)}" index="', body, f"{_CLOSE}call{_SEP}")


FORMAT = Format(
    thinking=Thinking(
        begin=f"{_OPEN}think{_SEP}",
        end=f"{_CLOSE}think{_SEP}",
        tokens=(_OPEN, _CLOSE, _SEP),
        is_open=True,
        also_ends=(f"{_OPEN}response{_SEP}", f"{_OPEN}tools{_SEP}"),
        anywhere=True,
    ),
    calls=Calls(
        begins=(f"{_OPEN}tools{_SEP}",),
        read=_read,
        tags=CallTags(
            tag=_tag, before=f"{_OPEN}tools{_SEP}", after=f"{_CLOSE}tools{_SEP}", trigger=f"{_OPEN}tools{_SEP}"
        ),
        tokens=(_OPEN, _CLOSE, _SEP),
    ),
    whole=_whole,
    answer=(f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}"),
    reasoning_signs=Signs(template=(_OPEN, _CLOSE, _SEP)),
    tool_signs=Signs(template=(_OPEN, _CLOSE, _SEP)),
    source=("vLLM documentation, reasoning/kimi_k3_reasoning_parser and tool_parsers/kimi_k3_tool_parser",),
)
