"""What a chat says about tools: which functions there are, and whether the model has to call one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from headrace.front.errors import RequestError
from headrace.server.bodies import ChatBody
from headrace.server.parsers.port import Tool

__all__ = ["ToolUse", "tool_use_of"]

Choice = Literal["none", "auto", "required", "named"]

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
MAX_TOOLS = 1024
MAX_ENUM = 1000
"""Values of one enumeration."""
_MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Of one request."""

    choice: Choice = "none"
    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    """All that the model may call; () with the choice `none`."""
    named: str = ""
    """The one it has to call, with the choice `named`."""
    parallel: bool = True
    """Several calls in one answer are wanted."""
    shown: tuple[Mapping[str, Any], ...] = ()
    """For the template, as the client wrote them."""

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def candidates(self) -> list[Tool]:
        """Of which a forced call is."""
        return [self.tools[self.named]] if self.choice == "named" else list(self.tools.values())


def tool_use_of(body: ChatBody) -> ToolUse:
    """Raises RequestError: a tool or a choice that isn't one; it says where."""
    given = body.tools or []
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools has {len(given)} items; at most {MAX_TOOLS} are taken", param="tools")
    tools: dict[str, Tool] = {}
    for index, item in enumerate(given):
        tool = _tool(item, f"tools[{index}]")
        if tool.name in tools:
            raise _wrong(f"tools[{index}].function.name {tool.name!r} is there twice: names must differ")
        tools[tool.name] = tool
    choice, named = _choice(body.tool_choice, tools)
    if choice == "none":
        return ToolUse()
    parallel = body.parallel_tool_calls is not False
    return ToolUse(choice=choice, tools=tools, named=named, parallel=parallel, shown=tuple(given))


def _tool(item: Mapping[str, Any], where: str) -> Tool:
    kind = item.get("type", "function")
    if kind != "function":
        raise _wrong(f"{where}.type must be 'function', got {kind!r:.60}: other tools are not run here")
    function = item.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function is required and must be an object")
    said = cast("dict[str, Any]", function)
    name = said.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.function.name must be 1 to 64 letters, digits, _, - or ., got {name!r:.80}")
    if not isinstance(said.get("description", ""), str | None):
        raise _wrong(f"{where}.function.description must be text")
    strict = said.get("strict")
    if strict not in (None, True, False):
        raise _wrong(f"{where}.function.strict must be true or false")
    parameters = said.get("parameters")
    _check_schema(parameters, f"{where}.function.parameters")
    return Tool(name, cast("dict[str, Any]", parameters or {}), strict=bool(strict))


def _check_schema(schema: Any, where: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise _wrong(f"{where} must be a JSON schema, an object")
    said = cast("dict[str, Any]", schema)
    if said and said.get("type", "object") != "object":
        raise _wrong(f"{where}.type must be 'object', since arguments have names, got {said['type']!r:.60}")
    properties = said.get("properties", {})
    if not isinstance(properties, dict):
        raise _wrong(f"{where}.properties must be an object")
    for name, value in cast("dict[str, Any]", properties).items():
        if not isinstance(value, dict | bool):
            raise _wrong(f"{where}.properties.{name:.60} must be a JSON schema, an object")
    if not isinstance(said.get("required", []), list):
        raise _wrong(f"{where}.required must be a list of names")
    _check_enums(said, where, 0)


def _check_enums(value: Any, where: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise _wrong(f"{where} is nested deeper than {_MAX_DEPTH} levels: simplify it")
    children: list[Any] = []
    if isinstance(value, dict):
        said = cast("dict[str, Any]", value)
        values = said.get("enum")
        if isinstance(values, list) and len(cast("list[Any]", values)) > MAX_ENUM:
            raise _wrong(f"{where}: an enum of more than {MAX_ENUM} values: use a pattern, or none")
        children = list(said.values())
    elif isinstance(value, list):
        children = cast("list[Any]", value)
    for child in children:
        _check_enums(child, where, depth + 1)


def _choice(given: Any, tools: Mapping[str, Tool]) -> tuple[Choice, str]:
    if given is None:
        return ("auto" if tools else "none"), ""
    if given in ("none", "auto"):
        return (given if tools else "none"), ""
    if given == "required":
        if not tools:
            raise _wrong_choice("tool_choice 'required' needs tools: send some")
        return "required", ""
    if isinstance(given, dict):
        said = cast("dict[str, Any]", given)
        function = said.get("function")
        name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        if said.get("type") != "function" or not isinstance(name, str):
            raise _wrong_choice('tool_choice must be {"type": "function", "function": {"name": ...}} or a word')
        if name not in tools:
            raise _wrong_choice(f"tool_choice names {name!r:.80}, which is none of the tools")
        return "named", name
    raise _wrong_choice(f"tool_choice must be none, auto, required or an object, got {given!r:.80}")


def _wrong(problem: str) -> RequestError:
    return RequestError(problem, param="tools", code="invalid_tools")


def _wrong_choice(problem: str) -> RequestError:
    return RequestError(problem, param="tool_choice", code="invalid_tool_choice")
