"""Structural tags: text with constrained parts in it, from xgrammar's `format` trees and TensorRT-LLM's older form.

A special token's spelling inside a literal means the token itself; `token` names one by its id as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from headrace.text.grammars.errors import GrammarError, step
from headrace.text.grammars.schema import SchemaRules, check_schema

__all__ = [
    "AnyText", "Choice", "Embedded", "Literal", "Node", "Pattern", "Repeat", "Schema", "Separated", "Sequence", "Tag",
    "Triggered", "parse_tag", "split_special",
]  # fmt: skip

MAX_DEPTH = 32
MAX_TIMES = 1000


@dataclass(frozen=True, slots=True)
class Literal:
    parts: tuple[str | int, ...]
    """Texts and token ids."""


@dataclass(frozen=True, slots=True)
class Schema:
    schema: Any
    """JSON that matches it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    regex: str


@dataclass(frozen=True, slots=True)
class Embedded:
    grammar: str


@dataclass(frozen=True, slots=True)
class AnyText:
    excludes: tuple[str, ...]
    """Texts that don't occur in it."""


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Tag:
    begin: Literal
    content: Node
    ends: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Triggered:
    """Free text; where a trigger comes, one of the tags that begin with it follows."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    excludes: tuple[str, ...]
    at_least_one: bool
    """The first tag comes at once, before any free text."""
    stop_after_first: bool

    def tags_of(self, trigger: str) -> list[Tag]:
        return [tag for tag in self.tags if _text_of(tag.begin).startswith(trigger)]


@dataclass(frozen=True, slots=True)
class Separated:
    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool
    stop_after_first: bool


Node = Literal | Schema | Pattern | Embedded | AnyText | Sequence | Choice | Repeat | Tag | Triggered | Separated


def split_special(literal: Literal, special: Mapping[str, int]) -> list[str | int]:
    """A literal as texts and token ids, the spellings of special tokens found in its texts."""
    found: list[str | int] = []
    for part in literal.parts:
        if isinstance(part, int):
            found.append(part)
        else:
            found += _split(part, special)
    return found


def _split(text: str, special: Mapping[str, int]) -> list[str | int]:
    at, name = min(((at, name) for name in special if (at := text.find(name)) >= 0),
                   key=lambda hit: (hit[0], -len(hit[1])), default=(-1, ""))  # fmt: skip
    if at < 0:
        return [text] if text else []
    before: list[str | int] = [text[:at]] if at else []
    return [*before, special[name], *_split(text[at + len(name) :], special)]


def parse_tag(given: Any, rules: SchemaRules) -> Node:
    """The tree of a structural tag. Raises GrammarError with the pointer of what is not known."""
    if isinstance(given, dict):
        body = cast("dict[str, Any]", given)
        if "structures" in body:
            return _older(body, rules)
        if body.get("type") == "structural_tag":
            fields = _Fields(body, "")
            fields.take("type")
            node = _node(fields.take("format"), rules, "/format", 0)
            fields.done()
            return node
    return _node(given, rules, "", 0)


class _Fields:
    """An object whose fields are taken one by one; what is left at the end is refused."""

    def __init__(self, given: Any, pointer: str) -> None:
        if not isinstance(given, dict):
            raise GrammarError(f"must be an object, got {given!r:.60}", pointer=pointer)
        self._left: dict[str, Any] = dict(cast("dict[str, Any]", given))
        self.pointer = pointer

    def at(self, name: str) -> str:
        return step(self.pointer, name)

    def take(self, name: str, default: Any = ...) -> Any:
        value = self._left.pop(name, default)
        if value is ...:
            raise GrammarError(f"{name} is missing", pointer=self.pointer)
        return value

    def text(self, name: str) -> str:
        return self._of(name, self.take(name), str)

    def flag(self, name: str) -> bool:
        return self._of(name, self.take(name, False), bool)

    def count(self, name: str) -> int:
        value = self._of(name, self.take(name), int)
        if value > MAX_TIMES:
            raise GrammarError(f"is {value}, and at most {MAX_TIMES} can be counted", pointer=self.at(name))
        return value

    def list_of(self, name: str, default: Any = ...) -> list[Any]:
        return self._of(name, self.take(name, default), list)

    def texts(self, name: str, default: Any = ...) -> tuple[str, ...]:
        items = self.list_of(name, default)
        for index, item in enumerate(items):
            if not isinstance(item, str) or not item:
                raise GrammarError("must be text, and not empty", pointer=step(self.at(name), index))
        return tuple(items)

    def _of(self, name: str, value: Any, kind: type[Any]) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            words = {str: "text", bool: "true or false", int: "a whole number", list: "a list"}
            raise GrammarError(f"must be {words[kind]}, got {value!r:.60}", pointer=self.at(name))
        return value

    def done(self) -> None:
        for name in self._left:
            raise GrammarError(f"{name} is not known here: leave it out", pointer=self.at(name))


def _node(given: Any, rules: SchemaRules, pointer: str, depth: int) -> Node:
    fields = _Fields(given, pointer)
    if depth > MAX_DEPTH:
        raise GrammarError(f"formats are nested more than {MAX_DEPTH} deep", pointer=pointer)
    kind = fields.take("type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(sorted(_READERS))
        raise GrammarError(f"the format {kind!r:.60} is not known; known: {known}", pointer=fields.at("type"))
    node = read(fields, rules, depth + 1)
    fields.done()
    return node


def _children(fields: _Fields, name: str, rules: SchemaRules, depth: int) -> tuple[Node, ...]:
    items = fields.list_of(name)
    if not items:
        raise GrammarError("must not be empty", pointer=fields.at(name))
    return tuple(_node(item, rules, step(fields.at(name), index), depth) for index, item in enumerate(items))


def _child(fields: _Fields, rules: SchemaRules, depth: int) -> Node:
    return _node(fields.take("content"), rules, fields.at("content"), depth)


def _schema(fields: _Fields, rules: SchemaRules, depth: int) -> Node:
    style = fields.take("style", "json")
    if style != "json":
        raise GrammarError(f"the style {style!r:.60} is not known; known: json", pointer=fields.at("style"))
    schema = fields.take("json_schema")
    check_schema(schema, rules, fields.at("json_schema"))
    return Schema(schema)


def _embedded(fields: _Fields, rules: SchemaRules, depth: int) -> Node:
    if fields.take("syntax", "ebnf") != "ebnf":
        raise GrammarError("only the syntax ebnf is known", pointer=fields.at("syntax"))
    return Embedded(fields.text("grammar"))


def _repeat(fields: _Fields, rules: SchemaRules, depth: int) -> Node:
    low, high = fields.count("min"), fields.count("max")
    if low < 0 or (high != -1 and high < max(low, 1)):
        raise GrammarError(f"min is {low} and max {high}", pointer=fields.pointer)
    return Repeat(_child(fields, rules, depth), low, None if high == -1 else high)


def _literal(value: Any, pointer: str) -> Literal:
    if isinstance(value, str):
        return Literal((value,))
    fields = _Fields(value, pointer)
    if fields.take("type") != "token":
        raise GrammarError("must be text or a token", pointer=pointer)
    token = fields.take("token")
    fields.done()
    if not isinstance(token, str | int) or isinstance(token, bool) or token == "":
        raise GrammarError("must be a token's text or id", pointer=step(pointer, "token"))
    return Literal((token,))


def _tag(fields: _Fields, rules: SchemaRules, depth: int) -> Tag:
    ends = fields.take("end")
    given: list[Any] = cast("list[Any]", ends) if isinstance(ends, list) else [ends]
    if not given:
        raise GrammarError("must not be empty", pointer=fields.at("end"))
    begin = _literal(fields.take("begin"), fields.at("begin"))
    return Tag(begin, _child(fields, rules, depth), tuple(_literal(end, fields.at("end")) for end in given))


def _tags(fields: _Fields, rules: SchemaRules, depth: int) -> tuple[Tag, ...]:
    found = _children(fields, "tags", rules, depth)
    for index, node in enumerate(found):
        if not isinstance(node, Tag):
            raise GrammarError("must be a tag", pointer=step(fields.at("tags"), index))
    return cast("tuple[Tag, ...]", found)


def _triggered(fields: _Fields, rules: SchemaRules, depth: int) -> Node:
    triggers = fields.texts("triggers")
    tags = _tags(fields, rules, depth)
    for index, tag in enumerate(tags):
        begin = _text_of(tag.begin)
        if sum(begin.startswith(trigger) for trigger in triggers) != 1:
            raise GrammarError(
                "must begin with exactly one of the triggers", pointer=f"{fields.at('tags')}/{index}/begin"
            )
    excludes = fields.texts("excludes", [])
    return Triggered(triggers, tags, excludes, fields.flag("at_least_one"), fields.flag("stop_after_first"))


def _separated(fields: _Fields, rules: SchemaRules, depth: int) -> Node:
    tags = _tags(fields, rules, depth)
    return Separated(tags, fields.text("separator"), fields.flag("at_least_one"), fields.flag("stop_after_first"))


def _text_of(literal: Literal) -> str:
    return "".join(part if isinstance(part, str) else "" for part in literal.parts)


_READERS: dict[str, Callable[[_Fields, SchemaRules, int], Node]] = {
    "const_string": lambda fields, rules, depth: Literal((fields.text("value"),)),
    "token": lambda fields, rules, depth: _literal({"type": "token", "token": fields.take("token")}, fields.pointer),
    "json_schema": _schema,
    "regex": lambda fields, rules, depth: Pattern(fields.text("pattern")),
    "grammar": _embedded,
    "any_text": lambda fields, rules, depth: AnyText(fields.texts("excludes", [])),
    "sequence": lambda fields, rules, depth: Sequence(_children(fields, "elements", rules, depth)),
    "or": lambda fields, rules, depth: Choice(_children(fields, "elements", rules, depth)),
    "optional": lambda fields, rules, depth: Repeat(_child(fields, rules, depth), 0, 1),
    "star": lambda fields, rules, depth: Repeat(_child(fields, rules, depth), 0, None),
    "plus": lambda fields, rules, depth: Repeat(_child(fields, rules, depth), 1, None),
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _separated,
}


def _older(body: dict[str, Any], rules: SchemaRules) -> Node:
    """TensorRT-LLM's older form: structures and triggers at the top."""
    fields = _Fields(body, "")
    if fields.take("type", "structural_tag") != "structural_tag":
        raise GrammarError("must be structural_tag", pointer="/type")
    tags: list[dict[str, Any]] = []
    for index, structure in enumerate(fields.list_of("structures")):
        own = _Fields(structure, f"/structures/{index}")
        schema = own.take("schema", True)
        schema = True if schema is None else schema
        check_schema(schema, rules, own.at("schema"))
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": own.text("begin"), "content": content, "end": own.text("end")})
        own.done()
    triggers = fields.texts("triggers")
    fields.done()
    return _node({"type": "triggered_tags", "triggers": list(triggers), "tags": tags}, rules, "", 0)
