"""A grammar's text read: schemas, choices, structural tags."""

from __future__ import annotations

import json
from typing import Any, cast

from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.schema import SchemaRules
from headrace.text.grammars.tags import Node, parse_tag

__all__ = ["MAX_SPEC_BYTES", "choices_of", "read_json", "schema_of", "tag_of"]

MAX_SPEC_BYTES = 1 << 20
MAX_CHOICES = 10_000


def read_json(text: str, what: str) -> Any:
    """Raises GrammarError for what is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is no JSON: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def schema_of(spec: str) -> Any:
    schema = read_json(spec, "the schema")
    if not isinstance(schema, dict | bool):
        raise GrammarError("the schema must be an object, true or false")
    return cast("Any", schema)


def choices_of(spec: str) -> list[str]:
    choices = read_json(spec, "the list of choices")
    if not isinstance(choices, list) or not choices:
        raise GrammarError("must be a list of texts, and not an empty one")
    items = cast("list[Any]", choices)
    for index, item in enumerate(items):
        if not isinstance(item, str) or not item:
            raise GrammarError("must be text, and not empty", pointer=f"/{index}")
    if len(items) > MAX_CHOICES:
        raise GrammarError(f"has {len(items)} choices; at most {MAX_CHOICES} are taken")
    return items


def tag_of(spec: str, rules: SchemaRules) -> Node:
    """The tree of a structural tag, its schemas checked."""
    return parse_tag(read_json(spec, "the structural tag"), rules)
