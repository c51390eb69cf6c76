"""JSON Schema (2020-12): a keyword is one that the grammar enforces, one that says nothing of the text, or refused.

The libraries drop some keywords without a word; this table is what stands between a schema and such a reply. What a
library finds wrong by itself (a pattern, a `oneOf` that can't be told apart) it says when it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from headrace.text.grammars.errors import GrammarError, step

__all__ = ["MAX_DEPTH", "SchemaRules", "check_schema", "copied", "places", "without_silent"]

MAX_DEPTH = 64
"""Of schemas within schemas. Deeper ones overflow the stack of some reader."""
MAX_COUNT = 10_000
"""Of minItems and the like: what a grammar must count."""
MAX_PLACES = 20_000
"""Schemas within one schema."""

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})

ANNOTATIONS = frozenset({
    "$schema", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml",
})  # fmt: skip
"""Say nothing of what is valid. The last four are OpenAPI's."""

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS = frozenset({"prefixItems", "anyOf", "allOf", "oneOf"})
SINGLE = frozenset({"items", "additionalProperties"})
COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})

REMEDIES: dict[str, str] = {
    "nullable": "add null to `type` instead",
    "const": "use an `enum` of one value",
    "if": "write the cases as `anyOf`",
    "then": "write the cases as `anyOf`",
    "else": "write the cases as `anyOf`",
    "oneOf": "use `anyOf` if the cases can't be told apart",
    "allOf": "write the merged schema",
    "additionalItems": "use `prefixItems` and `items`",
    "dependencies": "write the cases as `anyOf`",
    "dependentRequired": "write the cases as `anyOf`",
    "dependentSchemas": "write the cases as `anyOf`",
    "unevaluatedProperties": "use `additionalProperties`",
    "unevaluatedItems": "use `items`",
    "$anchor": "refer by a JSON pointer such as #/$defs/name",
    "$dynamicRef": "refer with `$ref`",
    "$recursiveRef": "refer with `$ref`",
}


class SchemaRules(NamedTuple):
    """What one library enforces."""

    library: str
    enforced: frozenset[str]
    formats: frozenset[str]
    check_node: Callable[[Mapping[str, Any], str], None] | None = None
    """Raises GrammarError for keywords of one schema that don't go together; with the schema's pointer."""
    max_count: int = MAX_COUNT


class Place(NamedTuple):
    pointer: str
    schema: Any
    depth: int

    @property
    def node(self) -> dict[str, Any] | None:
        """None for true and false."""
        schema: Any = self.schema
        return cast("dict[str, Any]", schema) if isinstance(schema, dict) else None


def places(schema: Any, pointer: str = "") -> Iterator[Place]:
    """Every schema within a schema, itself first. Raises GrammarError where a keyword can't hold one."""
    queue = [Place(pointer, schema, 0)]
    for count, place in enumerate(queue):
        yield place
        if place.node is None:
            continue
        if place.depth >= MAX_DEPTH:
            raise GrammarError(f"schemas are nested more than {MAX_DEPTH} deep: flatten it", pointer=place.pointer)
        if count >= MAX_PLACES:
            raise GrammarError(f"has more than {MAX_PLACES} schemas in it: shorten it", pointer=pointer)
        queue.extend(Place(at, inner, place.depth + 1) for at, inner in _within(place))


def _within(place: Place) -> Iterator[tuple[str, Any]]:
    for key, value in cast("dict[str, Any]", place.schema).items():
        at = step(place.pointer, key)
        if key in MAPS:
            if not isinstance(value, dict):
                raise GrammarError("must be an object of schemas", pointer=at)
            yield from ((step(at, name), inner) for name, inner in cast("dict[str, Any]", value).items())
        elif key in LISTS:
            if not isinstance(value, list) or not value:
                raise GrammarError("must be a list of schemas, and not an empty one", pointer=at)
            yield from ((step(at, index), inner) for index, inner in enumerate(cast("list[Any]", value)))
        elif key in SINGLE:
            if isinstance(value, list):
                raise GrammarError("is a list: use `prefixItems` for the first items", pointer=at)
            yield at, value


def without_silent(schema: Any) -> Any:
    """A copy of a checked schema without what says nothing and some library stumbles over."""
    found = copied(schema)
    for place in places(found):
        if place.node is not None:
            place.node.pop("uniqueItems", None)
    return found


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in cast("dict[str, Any]", value).items()}
    return [copied(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def check_schema(schema: Any, rules: SchemaRules, pointer: str = "") -> None:
    """Raises GrammarError with the pointer of what `rules.library` does not enforce."""
    if schema is False:
        raise GrammarError("is false: nothing matches it", pointer=pointer)
    for place in places(schema, pointer):
        node = place.node
        if node is None:
            if not isinstance(place.schema, bool):
                raise GrammarError("must be an object, true or false", pointer=place.pointer)
            continue
        for key, value in node.items():
            _check_keyword(key, value, node, rules, place.pointer)
        if rules.check_node is not None:
            rules.check_node(node, place.pointer)
        if "$ref" in node:
            _check_ref(node["$ref"], schema, step(place.pointer, "$ref"))


def _check_keyword(key: str, value: Any, node: Mapping[str, Any], rules: SchemaRules, pointer: str) -> None:
    at = step(pointer, key)
    if key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
        return
    if key == "$id" and not pointer:
        return
    if key == "uniqueItems" and value is False:
        return
    if key not in rules.enforced:
        remedy = REMEDIES.get(key, "leave it out")
        raise GrammarError(f"the keyword {key!r} is not enforced by {rules.library}: {remedy}", pointer=at)
    if key == "type":
        given = cast("list[Any]", value) if isinstance(value, list) else [value]
        wrong = [each for each in given if not isinstance(each, str) or each not in TYPES]
        if wrong or not given:
            raise GrammarError(f"must be of {', '.join(sorted(TYPES))}, got {value!r:.60}", pointer=at)
    elif key in COUNTS:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise GrammarError(f"must be a whole number from 0 on, got {value!r:.60}", pointer=at)
        if value > rules.max_count:
            raise GrammarError(f"is {value}, and at most {rules.max_count} can be counted: lower it", pointer=at)
        if key == "minProperties":
            _check_min_properties(value, node, at)
    elif key in NUMBERS:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise GrammarError(f"must be a number, got {value!r:.60}", pointer=at)
    elif key == "format" and value not in rules.formats:
        known = ", ".join(sorted(rules.formats)) or "none"
        raise GrammarError(f"the format {value!r:.60} is not enforced by {rules.library}; known: {known}", pointer=at)
    elif key == "pattern" and not isinstance(value, str):
        raise GrammarError(f"must be text, got {value!r:.60}", pointer=at)
    elif key == "enum" and not (isinstance(value, list) and value):
        raise GrammarError("must be a list of values, and not an empty one", pointer=at)
    elif key == "required" and not _is_names(value):
        raise GrammarError("must be a list of names", pointer=at)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in cast("list[Any]", value))


def _check_min_properties(value: int, node: Mapping[str, Any], at: str) -> None:
    """Names that are not listed may come twice in the text and are then one property."""
    if value > max(1, len(set(node.get("required", ())))):
        raise GrammarError(f"is {value}, and only 1 or what is required can be: list names in `required`", pointer=at)


def _check_ref(ref: Any, root: Any, at: str) -> None:
    if not isinstance(ref, str):
        raise GrammarError("must be text", pointer=at)
    seen: set[str] = set()
    while True:
        if ref in seen:
            raise GrammarError("refers to itself", pointer=at)
        seen.add(ref)
        target = _resolve(ref, root, at)
        if not isinstance(target, dict) or target.keys() - ANNOTATIONS - {"$defs", "definitions", "$id"} != {"$ref"}:
            return
        ref = cast("dict[str, Any]", target)["$ref"]
        if not isinstance(ref, str):
            return  # found at its own place


def _resolve(ref: str, root: Any, at: str) -> Any:
    if ref != "#" and not ref.startswith("#/"):
        raise GrammarError(f"{ref!r:.80} is not in this schema: use a JSON pointer such as #/$defs/name", pointer=at)
    found = root
    for part in ref.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = cast("dict[str, Any]", found)[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(cast("list[Any]", found)):
            found = cast("list[Any]", found)[int(name)]
        else:
            raise GrammarError(f"{ref!r:.80} is not there", pointer=at)
    return found
