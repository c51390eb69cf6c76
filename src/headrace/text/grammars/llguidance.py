"""The llguidance library: a lexer and an Earley parser; masks are computed at each step, and compiling is quick."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace.seam import Ints, token_bits
from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.lark import as_lark, choice_lark
from headrace.text.grammars.schema import SchemaRules, check_schema, places, without_silent
from headrace.text.grammars.spec import MAX_SPEC_BYTES, choices_of, schema_of, tag_of
from headrace.text.grammars.vocabulary import Vocabulary
from headrace.types import Grammar

if TYPE_CHECKING:
    import llguidance

__all__ = ["RULES", "LlguidanceCompiler", "check"]

RULES = SchemaRules(
    "llguidance",
    enforced=frozenset({
        "type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "items",
        "prefixItems", "minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength", "pattern",
        "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "allOf",
        "oneOf", "$ref", "$defs", "definitions",
    }),
    formats=frozenset({
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }),
)  # fmt: skip

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",  # bounded: a model may love to write blanks for ever
    "json_allowed_escapes": 'nrbtf\\"',  # \u would spell a listed name a second time, past its schema
    "lenient": False,
    "coerce_one_of": False,
}
MAX_BLAMED = 500
"""Schemas that are tried one by one for the place of an error."""


class LlguidanceMatcher:
    __slots__ = ("inner",)

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def advance(self, token: int) -> bool:
        return self.inner.consume_token(token)

    @property
    def can_end(self) -> bool:
        return self.inner.is_accepting()


class LlguidanceGrammar:
    def __init__(self, first: llguidance.LLMatcher) -> None:
        self._first = first

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._first.deep_copy())


class LlguidanceCompiler:
    """Implements the engine's `GrammarCompiler`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._vocabulary = vocabulary
        self._others = ~token_bits(vocabulary.end_ids, vocabulary.num_words)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Source(vocabulary)), eos_token=list(vocabulary.end_ids)
        )
        self._executor = llguidance.LLExecutor()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._vocabulary.end_ids

    @property
    def silent_ids(self) -> frozenset[int]:
        return self._vocabulary.silent_ids

    def compile(self, grammar: Grammar) -> LlguidanceGrammar:
        """Raises GrammarError."""
        import llguidance

        source = _source(grammar, self._vocabulary.special)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _blame(grammar, matcher.get_error())
        return LlguidanceGrammar(matcher)

    def fill(self, matchers: Sequence[LlguidanceMatcher], rows: Ints) -> dict[int, str]:
        assert rows.flags["C_CONTIGUOUS"] and rows.shape[1] == self._vocabulary.num_words
        width = rows.shape[1] * rows.itemsize
        if len(matchers) == 1:
            matchers[0].inner.unsafe_compute_mask_ptr(rows.ctypes.data, width)
        else:
            each = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(each, rows.ctypes.data, width, len(rows))
        # The library counts its end tokens among what may come.
        rows &= self._others
        return {
            row: _first_line(matcher.inner.get_error())
            for row, matcher in enumerate(matchers)
            if matcher.inner.is_error()
        }


class _Source:
    """The vocabulary in the form that the library reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        names = {token_id: spelling for spelling, token_id in vocabulary.special.items()}
        self.tokens = [
            names.get(i, "").encode() if i in vocabulary.silent_ids else text
            for i, text in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = sorted(vocabulary.silent_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("text, not bytes")
        return self._encode(text)


def check(grammar: Grammar, special: Mapping[str, int]) -> None:
    """What can be said without a vocabulary. Raises GrammarError.

    Args:
        special: spellings of the tokenizer's special tokens.
    """
    source = _source(grammar, special)
    if "<" in source and grammar.kind in ("ebnf", "structural_tag"):
        return  # may name tokens, which only a vocabulary knows
    problem = _validate(source)
    if problem:
        raise _blame(grammar, problem)


def _validate(source: str) -> str:
    import llguidance

    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, None, limits=_limits())
    return messages[0] if is_error else ""


@functools.cache
def _limits() -> llguidance.LLParserLimits:
    """Less than the defaults where a request could make a step slow."""
    import llguidance

    return llguidance.LLParserLimits(max_lexer_states=100_000, initial_lexer_fuel=300_000)


def _source(grammar: Grammar, special: Mapping[str, int]) -> str:
    """The library's own text for a grammar."""
    import llguidance

    if len(grammar.spec.encode()) > MAX_SPEC_BYTES:
        raise GrammarError(f"is longer than {MAX_SPEC_BYTES} bytes: shorten it")
    matcher = llguidance.LLMatcher
    match grammar.kind:
        case "json_object":
            return json_grammar({"type": "object"})
        case "json_schema":
            schema = schema_of(grammar.spec)
            check_schema(schema, RULES)
            return json_grammar(schema)
        case "regex":
            return matcher.grammar_from_regex(grammar.spec)
        case "choice":
            return matcher.grammar_from_lark(choice_lark(choices_of(grammar.spec)))
        case "ebnf":
            return _ebnf(grammar.spec)
        case "structural_tag":
            return as_lark(tag_of(grammar.spec, RULES), special, JSON_OPTIONS)


def json_grammar(schema: Any) -> str:
    import llguidance

    given: dict[str, Any] = {} if schema is True else without_silent(schema)
    return llguidance.LLMatcher.grammar_from_json_schema(given, overrides=cast("Any", JSON_OPTIONS))


def _ebnf(text: str) -> str:
    """Lark, or the notation with `root ::=` of other engines."""
    import llguidance

    try:
        return llguidance.grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_first_line(str(error))) from None


def _blame(grammar: Grammar, problem: str) -> GrammarError:
    """The error with its place: the innermost schema that is wrong by itself."""
    problem = _first_line(problem)
    if grammar.kind != "json_schema":
        return GrammarError(problem)
    within = list(places(schema_of(grammar.spec)))
    root = within[0].node or {}
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for place in reversed(within[:MAX_BLAMED]):
        if place.node is None:
            continue
        own = _validate(json_grammar({**place.node, **shared} if place.pointer else place.node))
        if own and _first_line(own) == problem:
            return GrammarError(problem, pointer=place.pointer)
    return GrammarError(problem)


def _first_line(text: str) -> str:
    """The library shows the place in a picture of several lines; the last of its words is the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = reasons[-1] if reasons else lines[0] if lines else "unknown error"
    return line[:300]
