"""MiniMax M3: elements named after the parameters, which may nest; a special token stands before every tag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import (
    ARRAY,
    OBJECT,
    STRING,
    inner_schema,
    json_of,
    kinds_of,
    named_parameters,
    tag,
    written,
)
from headrace.server.parsers._tape import Markers, Reading, Tape
from headrace.server.parsers._values import Arguments, to_json
from headrace.server.parsers.port import Calls, CallTags, Format, Signs, Thinking, Tool, Tree

__all__ = ["FORMAT"]

_NS = "]<]minimax[>["
_MARK = Markers((_NS,))
_BEGIN, _END = f"{_NS}<tool_call>", f"{_NS}</tool_call>"
_TAG = re.compile(r"[^<>]*")
_INVOKE = re.compile(r'invoke\s+name="?([^"]+?)"?')
_ITEM = "item"
_MAX_DEPTH = 64


@dataclass
class _Node:
    """An element's value while it is read."""

    name: str
    schema: Mapping[str, Any]
    text: list[str] = field(default_factory=list[str])
    members: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Names and JSON of the elements in it."""

    def child(self, name: str) -> _Node:
        if self._is_list(name):
            return _Node(name, inner_schema(self.schema.get("items")))
        return _Node(name, inner_schema(inner_schema(self.schema.get("properties")).get(name)))

    def to_json(self) -> str:
        kinds = kinds_of(self.schema)
        if self.members:
            if all(self._is_list(name) for name, _ in self.members):
                return f"[{', '.join(value for _, value in self.members)}]"
            pairs = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in self.members)
            return f"{{{', '.join(pairs)}}}"
        text = "".join(self.text)
        if not text.strip() and kinds in (ARRAY, OBJECT):
            return "[]" if kinds == ARRAY else "{}"
        return to_json(text, kinds)

    def _is_list(self, name: str) -> bool:
        kinds = kinds_of(self.schema)
        return "array" in kinds or (name == _ITEM and not kinds)


def _read(tape: Tape, out: Output, begin: str, tools: Mapping[str, Tool]) -> Reading[None]:
    lead = [begin, (yield from tape.white())]
    num_before = out.num_calls
    while (yield from tape.one_of(_MARK)):
        name, raw = yield from _tag_name(tape)
        function = _INVOKE.fullmatch(name)
        if function is None:
            if name != "/tool_call":
                lead += [_NS, raw]
            if out.num_calls > num_before:
                out.content("" if name == "/tool_call" else f"{_NS}{raw}")
            break
        out.begin_call(function[1])
        if not (yield from _call(tape, out, tools.get(function[1]))):
            return
        yield from tape.white()
    else:
        if out.num_calls == num_before:
            out.no_call("".join(lead))
        return
    if out.num_calls == num_before:
        out.no_call("".join(lead))


def _tag_name(tape: Tape) -> Reading[tuple[str, str]]:
    """What stands between the angle brackets that come next ('' if they aren't whole), and their text."""
    if (yield from tape.peek()) != "<":
        return "", ""
    parts = [tape.char()]
    yield from tape.run(_TAG, parts.append)
    name = "".join(parts)[1:]
    if (yield from tape.peek()) != ">":
        return "", f"<{name}"
    return name, f"<{name}{tape.char()}"


def _call(tape: Tape, out: Output, tool: Tool | None) -> Reading[bool]:
    """The parameters, and the end of the call; False: the output ended before."""
    arguments = Arguments(out, tool)
    while (yield from tape.until(_MARK, out.content)):
        name, raw = yield from _tag_name(tape)
        if name in ("/invoke", "/tool_call"):
            arguments.end()
            out.end_call()
            return name == "/invoke"
        if not name or name.startswith("/"):
            out.content(raw)
            continue
        arguments.key(name)
        if arguments.kinds(name) == STRING:
            arguments.quote()
            if not (yield from _string(tape, name, arguments)):
                return False
            arguments.quote()
        else:
            root = _Node(name, arguments.schema(name))
            if not (yield from _element(tape, root)):
                arguments.raw("".join(root.text))
                return False
            arguments.raw(root.to_json())
    return False


def _string(tape: Tape, name: str, arguments: Arguments) -> Reading[bool]:
    while (yield from tape.until(_MARK, arguments.piece)):
        end, raw = yield from _tag_name(tape)
        if end == f"/{name}":
            return True
        arguments.piece(raw)
    return False


def _element(tape: Tape, root: _Node) -> Reading[bool]:
    """An element and all in it, whose begin is read; whether its end came."""
    open_nodes = [root]
    while open_nodes:
        node = open_nodes[-1]
        if not (yield from tape.until(_MARK, node.text.append)):
            root.text = [piece for each in open_nodes for piece in each.text]
            return False
        name, raw = yield from _tag_name(tape)
        if name == f"/{node.name}":
            open_nodes.pop()
            if open_nodes:
                open_nodes[-1].members.append((node.name, node.to_json()))
        elif name and not name.startswith("/") and len(open_nodes) < _MAX_DEPTH:
            open_nodes.append(node.child(name))
        else:
            node.text.append(raw)
    return True


def _written(name: str, schema: Mapping[str, Any]) -> Tree:
    kinds = kinds_of(schema)
    begin, end = f"{_NS}<{name}>", f"{_NS}</{name}>"
    if kinds == OBJECT and schema.get("properties"):
        return tag(begin, named_parameters(Tool("", schema), _written), end)
    if kinds == ARRAY:
        item = _written(_ITEM, inner_schema(schema.get("items")))
        return tag(begin, {"type": "plus" if schema.get("minItems") else "star", "content": item}, end)
    return tag(begin, written(schema, _NS) if kinds == STRING else json_of(schema), end)


def _tag(tool: Tool) -> Tree:
    return tag(f'{_NS}<invoke name="{tool.name}">\n', named_parameters(tool, _written), f"\n{_NS}</invoke>")


FORMAT = Format(
    thinking=Thinking(begin="<mm:think>", end="</mm:think>", tokens=("<mm:think>", "</mm:think>")),
    calls=Calls(
        begins=(_BEGIN,),
        read=_read,
        tags=CallTags(tag=_tag, before=f"{_BEGIN}\n", separator="\n", after=f"\n{_END}", trigger=_BEGIN),
        tokens=(_NS, "<tool_call>", "</tool_call>"),
        ends_reasoning=True,
    ),
    reasoning_signs=Signs(template=("<mm:think>",)),
    tool_signs=Signs(template=(_NS,)),
    source=(
        "vLLM documentation, parser/minimax_m3",
        "llama.cpp common/parsers/minimax-m3.cpp (description of the format)",
    ),
)
