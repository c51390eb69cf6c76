"""Arguments that a format writes one by one, as text: to a JSON object, with the types that the tool's schema says."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from headrace.server.parsers._output import Output
from headrace.server.parsers._tags import kinds_of, properties_of
from headrace.server.parsers.port import Tool

__all__ = ["Arguments", "to_json"]

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class Arguments:
    """The arguments of the call that `out` has begun, member by member."""

    def __init__(self, out: Output, tool: Tool | None) -> None:
        self._out = out
        self._schemas = properties_of(tool) if tool else {}
        self._num = 0

    def kinds(self, name: str) -> frozenset[str]:
        """JSON types that the parameter takes; empty when nobody says."""
        schema = self._schemas.get(name)
        return kinds_of(schema) if schema else frozenset()

    def schema(self, name: str) -> Mapping[str, Any]:
        return self._schemas.get(name, {})

    def key(self, name: str) -> None:
        """A member begins."""
        before = ", " if self._num else "{"
        self._num += 1
        self._out.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")

    def raw(self, text: str) -> None:
        """A piece of a value, JSON already."""
        self._out.arguments(text)

    def quote(self) -> None:
        """A string begins or ends."""
        self._out.arguments('"')

    def piece(self, text: str) -> None:
        """Of a string that has begun."""
        self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self._out.arguments("}" if self._num else "{}")


def to_json(text: str, kinds: frozenset[str]) -> str:
    """JSON of a value that was written as text. What doesn't fit its type is the text, as a string."""
    stripped = text.strip()
    word = _WORDS.get(stripped.lower())
    if word is not None and (not kinds or ("boolean" if word != "null" else "null") in kinds):
        return word if kinds or stripped in ("true", "false", "null") else json.dumps(text, ensure_ascii=False)
    value = _parsed(stripped)
    if value is not None and (not kinds or _fits(value, kinds)):
        return stripped if _is_json(stripped) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    if text[:1] not in ("[", "{"):
        return None
    try:  # models trained on Python write its literals now and then
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return not kinds.isdisjoint({"integer", "number"})
    if isinstance(value, float):
        return "number" in kinds or ("integer" in kinds and value.is_integer())
    if isinstance(value, str):
        return "string" in kinds
    return ("array" if isinstance(value, list) else "object") in kinds
