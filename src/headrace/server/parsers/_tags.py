"""Calls as grammars: what a model may write when it has to call a tool, in its own format.

The trees are those of `text/grammars` (kind `structural_tag`): valid by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from headrace.server.parsers.port import CallTags, Thinking, Tool, Tree

__all__ = [
    "ARRAY",
    "OBJECT",
    "STRING",
    "any_text",
    "arguments_of",
    "const",
    "forced_calls",
    "inner_schema",
    "json_of",
    "kinds_of",
    "later_part",
    "listed_parameters",
    "named_parameters",
    "optional",
    "properties_of",
    "sequence",
    "strict_calls",
    "tag",
    "written",
]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
ARRAY, OBJECT, STRING = (frozenset({kind}) for kind in ("array", "object", "string"))
"""What `kinds_of` says where there is one type only."""


def tag(begin: str, content: Tree, end: str) -> Tree:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> Tree:
    return {"type": "const_string", "value": value}


def sequence(*elements: Tree) -> Tree:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def optional(content: Tree) -> Tree:
    return {"type": "optional", "content": content}


def any_text(*excludes: str) -> Tree:
    return {"type": "any_text", "excludes": list(excludes)}


def json_of(schema: Mapping[str, Any]) -> Tree:
    return {"type": "json_schema", "json_schema": dict(schema)}


def arguments_of(tool: Tool) -> Tree:
    """The whole arguments as a JSON object."""
    return json_of(tool.parameters or ANY_OBJECT)


def forced_calls(tags: CallTags, tools: Sequence[Tool], *, many: bool) -> Tree:
    """An output that is nothing but calls of these tools: one, or one and more."""
    calls: Tree = {
        "type": "tags_with_separator",
        "tags": [tags.tag(tool) for tool in tools],
        "separator": tags.separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }
    around = [*([const(tags.before)] if tags.before else []), calls, *([const(tags.after)] if tags.after else [])]
    return sequence(*around)


def strict_calls(tags: CallTags, tools: Sequence[Tool], *, many: bool) -> Tree:
    """Free text in which whatever begins as a call is one of these tools'."""
    each = [tags.tag(tool) for tool in tools]
    if tags.before:
        whole: Tree = {
            "type": "tags_with_separator",
            "tags": each,
            "separator": tags.separator,
            "at_least_one": True,
            "stop_after_first": not many,
        }
        each = [tag(tags.before, whole, tags.after)]
    return {
        "type": "triggered_tags",
        "triggers": [tags.trigger],
        "tags": each,
        "at_least_one": False,
        "stop_after_first": not many,
    }


def later_part(thinking: Thinking, tree: Tree, *, answer: tuple[str, str], is_open: bool) -> Tree:
    """`tree`, inside of the marks of an answer, behind the reasoning.

    `is_open`: the grammar begins where the reasoning has ended; otherwise the output may begin with reasoning or not.
    """
    if answer[0]:
        tree = tag(answer[0], tree, answer[1])
    between = [const(thinking.between)] if thinking.between else [optional({"type": "regex", "pattern": r"\s{1,4}"})]
    if is_open:
        return sequence(*between, tree)
    reasoning = tag(thinking.begin, any_text(thinking.end), thinking.end)
    return sequence(optional(sequence(reasoning, *between)), tree)


def properties_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments by name, each with the definitions that its references need."""
    given = tool.parameters.get("properties")
    properties = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {
        name: {**shared, **cast("dict[str, Any]", schema)} if isinstance(schema, dict) else {}
        for name, schema in properties.items()
    }


def named_parameters(tool: Tool, parameter: Any) -> Tree:
    """Parameters one after the other in the schema's order, those that aren't required possibly left out.

    `parameter(name, schema)` is one's tree.
    """
    given = tool.parameters.get("required")
    required = set(cast("list[Any]", given)) if isinstance(given, list) else set[Any]()
    trees: list[Tree] = []
    for name, schema in properties_of(tool).items():
        tree: Tree = parameter(name, schema)
        trees.append(tree if name in required else optional(tree))
    return sequence(*trees) if trees else const("")


def inner_schema(value: Any) -> Mapping[str, Any]:
    """A schema that is part of another; {} where there is none (or a bare true)."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a schema allows as far as it says so directly; empty when it doesn't say."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(str(kind) for kind in cast("list[Any]", given))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            kinds = [kinds_of(cast("dict[str, Any]", each)) for each in cast("list[Any]", options)
                     if isinstance(each, dict)]  # fmt: skip
            none: frozenset[str] = frozenset()
            return none.union(*kinds) if kinds and all(kinds) else none
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(_kind(value) for value in cast("list[Any]", values))
    return frozenset()


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def written(schema: Mapping[str, Any], *excludes: str) -> Tree:
    """A value as formats write it that put strings without quotes and anything else as JSON."""
    if kinds_of(schema) != STRING:
        return json_of(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {"type": "or", "elements": [const(str(value)) for value in cast("list[Any]", values)]}
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        return {"type": "regex", "pattern": pattern}
    return any_text(*excludes)


def listed_parameters(tool: Tool, parameter: Any, *, separator: str) -> Tree:
    """As `named_parameters`, with a separator between those that are there.

    `parameter(name, schema)` is one's tree.
    """
    given = tool.parameters.get("required")
    required = set(cast("list[Any]", given)) if isinstance(given, list) else set[Any]()
    trees = [(parameter(name, schema), name in required) for name, schema in properties_of(tool).items()]
    # From the last parameter to the first: what may follow when one has been written, and when none has.
    later: Tree = const("")
    first: Tree = const("")
    for tree, is_required in reversed(trees):
        with_it = sequence(tree, later)
        first = with_it if is_required else {"type": "or", "elements": [with_it, first]}
        next_one = sequence(const(separator), tree)
        later = sequence(next_one if is_required else optional(next_one), later)
    return first
