"""The xgrammar library: a pushdown automaton; masks are made when compiling. It brings torch along when it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.seam import Ints, token_bits
from headrace.text.grammars import tags
from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.schema import check_schema
from headrace.text.grammars.spec import choices_of, schema_of, tag_of
from headrace.text.grammars.tags import Node
from headrace.text.grammars.vocabulary import Vocabulary
from headrace.text.grammars.xgrammar_schema import RULES, rewritten
from headrace.types import Grammar

if TYPE_CHECKING:
    import xgrammar

__all__ = ["XgrammarCompiler", "check"]

MAX_SPEC_BYTES = 1 << 17
"""Compiling takes more than linear time, and can't be stopped."""
MAX_WHITESPACE = 64
CACHE_BYTES = 256 << 20


class XgrammarMatcher:
    __slots__ = ("inner",)

    def __init__(self, inner: xgrammar.GrammarMatcher) -> None:
        self.inner = inner

    def advance(self, token: int) -> bool:
        return self.inner.accept_token(token)

    @property
    def can_end(self) -> bool:
        return self.inner.is_completed()


class XgrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def matcher(self) -> XgrammarMatcher:
        import xgrammar

        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled))


class XgrammarCompiler:
    """Implements the engine's `GrammarCompiler`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._vocabulary = vocabulary
        others = set(range(len(vocabulary.tokens))) - set(vocabulary.end_ids)
        self._others = token_bits(others, vocabulary.num_words)
        info = xgrammar.TokenizerInfo(
            _spelled(vocabulary), vocab_size=len(vocabulary.tokens), stop_token_ids=list(vocabulary.end_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=CACHE_BYTES)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._vocabulary.end_ids

    @property
    def silent_ids(self) -> frozenset[int]:
        return self._vocabulary.silent_ids

    def compile(self, grammar: Grammar) -> XgrammarGrammar:
        """Raises GrammarError."""
        _check_size(grammar)
        try:
            return XgrammarGrammar(self._compile(grammar))
        except GrammarError:
            raise
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_last_line(str(error))) from None

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        import xgrammar

        compiler = self._compiler
        match grammar.kind:
            case "json_object":
                return compiler.compile_json_schema(
                    {"type": "object"}, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "json_schema":
                schema = schema_of(grammar.spec)
                check_schema(schema, RULES)
                text = json.dumps({} if schema is True else rewritten(schema))
                return compiler.compile_json_schema(text, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
            case "regex":
                return compiler.compile_regex(grammar.spec)
            case "choice":
                return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(_choice_ebnf(choices_of(grammar.spec))))
            case "ebnf":
                return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(grammar.spec))
            case "structural_tag":
                tree = as_format(tag_of(grammar.spec, RULES), self._vocabulary.special)
                return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": tree}))

    def fill(self, matchers: Sequence[XgrammarMatcher], rows: Ints) -> dict[int, str]:
        for row, matcher in enumerate(matchers):
            if matcher.inner.is_terminated():
                rows[row] = 0
            else:
                matcher.inner.fill_next_token_bitmask(rows, row)
        rows &= self._others
        return {}


def _spelled(vocabulary: Vocabulary) -> list[bytes]:
    """Special tokens get bytes that are in no text; the library ignores tokens without any."""
    tokens = list(vocabulary.tokens)
    for spelling, token in vocabulary.special.items():
        if not tokens[token]:
            tokens[token] = b"\xff" + spelling.encode()
    return tokens


def check(grammar: Grammar, special: Mapping[str, int]) -> None:
    """What can be said without the library, which would bring torch. Raises GrammarError."""
    _check_size(grammar)
    match grammar.kind:
        case "json_schema":
            check_schema(schema_of(grammar.spec), RULES)
        case "choice":
            choices_of(grammar.spec)
        case "structural_tag":
            as_format(tag_of(grammar.spec, RULES), special)
        case _:
            pass


def _check_size(grammar: Grammar) -> None:
    if len(grammar.spec.encode()) > MAX_SPEC_BYTES:
        raise GrammarError(f"is longer than {MAX_SPEC_BYTES} bytes: shorten it")


def _choice_ebnf(choices: Sequence[str]) -> str:
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "unknown error")[:300]


# ---- structural tags -------------------------------------------------------------------------


def as_format(node: Node, special: Mapping[str, int]) -> dict[str, Any]:
    """A tree in the library's own form. Special tokens are by their ids there."""

    def write(node: Node) -> dict[str, Any]:
        match node:
            case tags.Literal():
                return _in_a_row([_part(part) for part in tags.split_special(node, special)])
            case tags.Schema(schema):
                return {"type": "json_schema", "json_schema": rewritten(schema), "max_whitespace_cnt": MAX_WHITESPACE}
            case tags.Pattern(regex):
                return {"type": "regex", "pattern": regex}
            case tags.Embedded(grammar):
                return {"type": "grammar", "grammar": grammar}
            case tags.AnyText(excludes):
                return {"type": "any_text", "excludes": list(excludes)}
            case tags.Sequence(items):
                return {"type": "sequence", "elements": [write(item) for item in items]}
            case tags.Choice(items):
                return {"type": "or", "elements": [write(item) for item in items]}
            case tags.Repeat(item, low, high):
                return {"type": "repeat", "min": low, "max": -1 if high is None else high, "content": write(item)}
            case tags.Tag():
                return _tag(node, special, write(node.content))
            case tags.Triggered():
                return _triggered(node, special, [write(tag) for tag in node.tags])
            case tags.Separated(each, separator, at_least_one, stop_after_first):
                return {
                    "type": "tags_with_separator",
                    "tags": [write(tag) for tag in each],
                    "separator": separator,
                    "at_least_one": at_least_one,
                    "stop_after_first": stop_after_first,
                }

    return write(node)


def _part(part: str | int) -> dict[str, Any]:
    return {"type": "const_string", "value": part} if isinstance(part, str) else {"type": "token", "token": part}


def _in_a_row(formats: list[dict[str, Any]]) -> dict[str, Any]:
    if len(formats) == 1:
        return formats[0]
    return {"type": "sequence", "elements": formats} if formats else {"type": "const_string", "value": ""}


def _tag(tag: tags.Tag, special: Mapping[str, int], content: dict[str, Any]) -> dict[str, Any]:
    """The library's tags begin and end with one text or one token; what is more goes to the content."""
    begin = tags.split_special(tag.begin, special)
    first: Any = begin[0] if begin else ""
    before = [_part(part) for part in begin[1:]]
    ends = [tags.split_special(end, special) for end in tag.ends]
    if any(len(end) > 1 for end in ends) or (len(ends) > 1 and any(isinstance(p, int) for end in ends for p in end)):
        raise GrammarError("xgrammar ends a tag with texts, or with one special token: use llguidance for mixed ends")
    end: Any = [end[0] if end else "" for end in ends]
    return {
        "type": "tag",
        "begin": first if isinstance(first, str) else _part(first),
        "content": _in_a_row([*before, content]),
        "end": (end[0] if isinstance(end[0], str) else _part(end[0])) if len(end) == 1 else end,
    }


def _triggered(node: tags.Triggered, special: Mapping[str, int], written: list[dict[str, Any]]) -> dict[str, Any]:
    triggers = [tags.split_special(tags.Literal((trigger,)), special) for trigger in node.triggers]
    tokens = [trigger[0] for trigger in triggers if len(trigger) == 1 and isinstance(trigger[0], int)]
    ways = {"tags": written, "at_least_one": node.at_least_one, "stop_after_first": node.stop_after_first}
    if len(tokens) == len(triggers) and not node.excludes:
        others = sorted(set(special.values()) - set(tokens))  # free text there is of any tokens
        return {"type": "token_triggered_tags", "trigger_tokens": tokens, "exclude_tokens": others, **ways}
    if any(not isinstance(part, str) for trigger in triggers for part in trigger):
        raise GrammarError("xgrammar's triggers are texts, or one special token each: use llguidance for mixed ones")
    return {"type": "triggered_tags", "triggers": list(node.triggers), "excludes": list(node.excludes), **ways}
