"""What xgrammar makes of JSON schemas, found by experiment: keywords that it drops beside others, and raw strings.

It puts a `pattern` between the quotes as it is, so one that matches a quote or a line break writes broken JSON, and it
writes control characters into strings of a bounded length. Such bounds are written here as patterns of JSON text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from headrace.text.grammars.errors import GrammarError, step
from headrace.text.grammars.schema import ANNOTATIONS, SchemaRules, places, without_silent

__all__ = ["RULES", "rewritten"]

SILENT = ANNOTATIONS | {"$defs", "definitions", "$id"}
BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "additionalProperties", "required"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
BY_TYPE["integer"] = BY_TYPE["number"]
ALONE = ("$ref", "anyOf", "enum", "const")
"""Keywords beside which the library sees no others."""
RISKY = re.compile(r"[\".]|\[\^|\\(?![dwD.+*?()\[\]{}|/^$-])|[^ -~]")
"""In a pattern: what may match a character that JSON escapes."""
CHARACTER = r"(?:[^\"\\\x00-\x1f\x7f]|\\[\"\\/bfnrt])"
"""One character of a JSON string, as text."""
PYTHON_TYPES: dict[str, tuple[type[Any], ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
    "number": (int, float),
    "integer": (int,),
}


def _check_node(node: Mapping[str, Any], pointer: str) -> None:
    """Raises GrammarError for keywords that would be dropped here."""
    said = node.keys() - SILENT
    for key in ALONE:
        others = sorted(said - {key, "type"} if key in ("enum", "const") else said - {key})
        if key in node and others:
            raise GrammarError(
                f"{others[0]} beside {key} is not enforced by xgrammar: merge them", pointer=step(pointer, others[0])
            )
    if "type" in node and ("enum" in node or "const" in node):
        _check_values(node, pointer)
        return
    kind = node.get("type")
    mine = BY_TYPE.get(kind, frozenset[str]()) if isinstance(kind, str) else frozenset[str]()
    for key in sorted(said & frozenset[str]().union(*BY_TYPE.values()) - mine):
        problem = f"{key} is enforced by xgrammar only beside the one `type` that it is of"
        raise GrammarError(problem, pointer=step(pointer, key))
    for name in node.get("required", ()):
        if name not in node.get("properties", {}):
            raise GrammarError(
                f"{name!r:.60} must be in `properties` too for xgrammar", pointer=step(pointer, "required")
            )
    if "properties" in node and not isinstance(node.get("additionalProperties", True), bool):
        problem = "a schema here beside `properties` is not enforced by xgrammar: make it false, or list the names"
        raise GrammarError(problem, pointer=step(pointer, "additionalProperties"))
    if "pattern" in node:
        _check_pattern(node, step(pointer, "pattern"))


def _check_values(node: Mapping[str, Any], pointer: str) -> None:
    given: Any = node["type"]
    kinds = cast("list[str]", given) if isinstance(given, list) else [str(given)]
    allowed = tuple(kind for name in kinds for kind in PYTHON_TYPES[name])
    for value in cast("list[Any]", node.get("enum", [node.get("const")])):
        is_of = isinstance(value, allowed) and (not isinstance(value, bool) or "boolean" in kinds)
        if not is_of:
            raise GrammarError(f"{value!r:.60} is not of this type", pointer=step(pointer, "type"))


def _check_pattern(node: Mapping[str, Any], at: str) -> None:
    if "minLength" in node or "maxLength" in node:
        raise GrammarError("a length beside it is not enforced by xgrammar: write {m,n} in the pattern", pointer=at)
    found = RISKY.search(str(node["pattern"]))
    if found:
        problem = (
            f"{found[0]!r} may match what JSON escapes, which xgrammar doesn't: name the characters, or use llguidance"
        )
        raise GrammarError(problem, pointer=at)


RULES = SchemaRules(
    "xgrammar",
    enforced=frozenset({"type", "$defs", "definitions", *ALONE}).union(*BY_TYPE.values()),
    formats=frozenset(),
    check_node=_check_node,
    max_count=200,  # the work of a mask grows with it
)


def rewritten(schema: Any) -> Any:
    """A checked schema with lengths as patterns of JSON text, and listed names as all that there are.

    The library would write a listed name a second time, under the schema of the others.
    """
    found = without_silent(schema)
    for place in places(found):
        node = place.node
        if node is None:
            continue
        if "minLength" in node or "maxLength" in node:
            low, high = node.pop("minLength", 0), node.pop("maxLength", "")
            node["pattern"] = f"^{CHARACTER}{{{low},{high}}}$"
        if "properties" in node:
            node["additionalProperties"] = False
    return found
