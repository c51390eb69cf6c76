"""Structural tags and choices as grammars for llguidance: its dialect of Lark, with `%json` for schemas.

Where free text is followed by a literal, both are one lazy lexeme: the text ends where the literal first occurs. The
lexer is greedy, so apart they would never meet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.grammars import tags
from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.schema import without_silent
from headrace.text.grammars.tags import Node

__all__ = ["as_lark", "choice_lark"]

ANY = "(?s:.*)"


def choice_lark(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(_quoted(choice) for choice in choices)


def as_lark(node: Node, special: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """The library's JSON for a tree.

    Args:
        special: ids of special tokens by their spelling.
    """
    writer = _Writer(special, json_options)
    start = writer.expression([node])
    lark = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])
    return json.dumps({"grammars": [{"name": "tag", "lark_grammar": lark}, *writer.embedded]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    import llguidance

    return f"/{llguidance.regex_to_lark(pattern, '')}/"


class _Writer:
    def __init__(self, special: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self.embedded: list[dict[str, Any]] = []
        self._special = special
        self._json_options = dict(json_options)

    def expression(self, items: Sequence[Node]) -> str:
        """Items one after another, as the right side of a rule."""
        if not items:
            return '""'
        first, rest = items[0], items[1:]
        match first:
            case tags.Sequence(inner):
                return self.expression([*inner, *rest])
            case tags.Tag(begin, content, ends):
                end: Node = ends[0] if len(ends) == 1 else tags.Choice(ends)
                return self.expression([begin, content, end, *rest])
            case tags.AnyText(excludes):
                return self._free_text(excludes, rest)
            case tags.Triggered():
                return self._triggered(first, rest)
            case tags.Choice(choices) if rest and any(_ends_free(choice) for choice in choices):
                return self._either([self.expression([choice, *rest]) for choice in choices])
            case _:
                own = self._one(first)
                return f"{own} {self.expression(rest)}" if rest else own

    def _one(self, node: Node) -> str:
        match node:
            case tags.Literal():
                return self._literal(node)
            case tags.Schema(schema):
                given: dict[str, Any] = {} if schema is True else without_silent(schema)
                return self._rule("%json " + json.dumps({**given, "x-guidance": self._json_options}))
            case tags.Pattern(regex):
                return self._rule(_regex(regex))
            case tags.Embedded(grammar):
                return self._embed(grammar)
            case tags.Choice(items):
                return self._either([self.expression([item]) for item in items])
            case tags.Repeat(item, low, high):
                return self._repeat(item, low, high)
            case tags.Separated():
                return self._separated(node)
            case _:
                raise AssertionError(node)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _either(self, alternatives: Sequence[str]) -> str:
        return alternatives[0] if len(alternatives) == 1 else f"( {' | '.join(alternatives)} )"

    def _literal(self, literal: tags.Literal) -> str:
        parts = tags.split_special(literal, self._special)
        return " ".join(_quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts) or '""'

    def _embed(self, grammar: str) -> str:
        import llguidance

        try:
            source = llguidance.grammar_from("grammar", grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"a grammar in the tag: {error}") from None
        name = f"g{len(self.embedded)}"
        self.embedded.append({"name": name, "lark_grammar": source})
        return f"@{name}"

    def _repeat(self, item: Node, low: int, high: int | None) -> str:
        if _ends_free(item):
            raise GrammarError("free text can't be repeated: end it with a literal")
        inner = self._rule(self.expression([item]))
        return f"{inner}{{{low},{'' if high is None else high}}}"

    def _separated(self, node: tags.Separated) -> str:
        tag = self._rule(self._either([self.expression([each]) for each in node.tags]))
        if node.stop_after_first:
            return tag if node.at_least_one else f"({tag})?"
        more = f"({self._literal(tags.Literal((node.separator,)))} {tag})*" if node.separator else f"({tag})*"
        return f"{tag} {more}" if node.at_least_one else f"({tag} {more})?"

    # ---- free text ---------------------------------------------------------------------------

    def _text(self, excludes: Sequence[str]) -> str:
        """A terminal of any text, without these in it."""
        texts = [text for text in excludes if text not in self._special]  # a special token is no text anyway
        body = f"/{ANY}/" + "".join(f" & ~({_any()} {_quoted(text)} {_any()})" for text in texts)
        return self._terminal(body)

    def _until(self, excludes: Sequence[str], stop: str) -> str:
        """Free text up to and with the first `stop`, which has no special token in it."""
        return self._rule(f"{self._text(excludes)} {_quoted(stop)}", lazy=True)

    def _free_text(self, excludes: Sequence[str], rest: Sequence[Node]) -> str:
        if not rest:
            return self._text(excludes)
        following, after = rest[0], rest[1:]
        if isinstance(following, tags.Sequence):
            return self._free_text(excludes, [*following.items, *after])
        if isinstance(following, tags.Tag):
            return self._free_text(excludes, [following.begin, following.content, tags.Choice(following.ends), *after])
        if isinstance(following, tags.Choice):
            return self._either([self._free_text(excludes, [each, *after]) for each in following.items])
        if not isinstance(following, tags.Literal):
            raise GrammarError("free text must be followed by a literal, or end the tag: where does it stop?")
        parts = tags.split_special(following, self._special)
        if not parts:
            return self._free_text(excludes, after)
        if isinstance(parts[0], int):
            head = f"{self._text(excludes)} <[{parts[0]}]>"
        else:
            head = self._until(excludes, parts[0])
        others = self._literal(tags.Literal(tuple(parts[1:]))) if parts[1:] else ""
        return " ".join(part for part in (head, others, self.expression(after) if after else "") if part)

    def _triggered(self, node: tags.Triggered, rest: Sequence[Node]) -> str:
        if node.at_least_one:
            first = self._rule(self._either([self.expression([tag]) for tag in node.tags]))
            if node.stop_after_first:
                return f"{first} {self.expression(rest)}" if rest else first
            return f"{first} {self._dispatch(node, rest)}"
        return self._dispatch(node, rest)

    def _dispatch(self, node: tags.Triggered, rest: Sequence[Node]) -> str:
        calls: list[str] = []
        for trigger in node.triggers:
            for tag in node.tags_of(trigger):
                begin = tags.Literal((trigger,)), tags.Literal((_after(tag.begin, trigger),))
                ends: Node = tags.Choice(tag.ends)
                calls.append(self._rule(self._free_text(node.excludes, [*begin, tag.content, ends])))
        call = self._rule(self._either(calls))
        tail = self._free_text((*node.excludes, *node.triggers), rest)
        if node.stop_after_first:
            done = f"{call} {self.expression(rest)}" if rest else call
            return self._either([done, tail])
        return f"({call})* {tail}"


def _any() -> str:
    return f"/{ANY}/"


def _after(begin: tags.Literal, trigger: str) -> str:
    text = "".join(part for part in begin.parts if isinstance(part, str))
    return text[len(trigger) :]


def _ends_free(node: Node) -> bool:
    """Whether free text may stand last in it."""
    match node:
        case tags.AnyText() | tags.Triggered():
            return True
        case tags.Sequence(items):
            return _ends_free(items[-1])
        case tags.Choice(items):
            return any(_ends_free(item) for item in items)
        case tags.Repeat(item):
            return _ends_free(item)
        case _:
            return False
