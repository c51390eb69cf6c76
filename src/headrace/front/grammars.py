"""A caller's constraint on the text -> the grammar of a request, checked as far as that can be without the engine."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from headrace.front.errors import RequestError
from headrace.params import FieldError, GuidedDecodingParams
from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.load import DEFAULT, Backend, checker_of
from headrace.text.grammars.spec import MAX_SPEC_BYTES
from headrace.text.grammars.vocabulary import special_spellings
from headrace.text.tokenizer import Tokenizer
from headrace.types import Grammar, Marker

__all__ = ["Grammars"]

MAX_CHECKED = 256
"""Grammars whose check is remembered."""


class Grammars:
    """Shared by threads."""

    def __init__(self, tokenizer: Tokenizer | None, backend: Backend | None = None) -> None:
        self._tokenizer = tokenizer
        self._check = checker_of(backend or DEFAULT)
        self._special = special_spellings(tokenizer) if tokenizer is not None else {}
        self._checked: OrderedDict[tuple[str, str], str] = OrderedDict()

    def build(self, guided: GuidedDecodingParams | None, *, param: str, starts_after: Marker = ()) -> Grammar | None:
        """None when nothing is asked for.

        Raises:
            RequestError: what is asked for can't be enforced to the letter; it names `param` and the place.
        """
        if guided is None:
            return None
        if not isinstance(guided, GuidedDecodingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"{param} must be GuidedDecodingParams, got {type(guided).__name__}", param=param)
        try:
            guided.__post_init__()  # fields may have been assigned since
            grammar = _grammar_of(guided, param, starts_after)
            if grammar is None:
                return None
            if self._tokenizer is None:
                raise GrammarError("needs a tokenizer and this engine has none: leave it out")
            self._require(grammar)
        except FieldError as error:
            raise RequestError(str(error), param=param) from None
        except GrammarError as error:
            raise RequestError(f"{param}: {error}", param=param, code="invalid_grammar") from None
        return grammar

    def _require(self, grammar: Grammar) -> None:
        """Raises GrammarError; what a grammar's first check found is remembered."""
        key = grammar.kind, grammar.spec
        error = self._checked.get(key)
        if error is None:
            error = self._checked[key] = self._error_of(grammar)
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        if error:
            raise GrammarError(error)

    def _error_of(self, grammar: Grammar) -> str:
        """What is wrong; "" when it can be enforced."""
        try:
            self._check(grammar, self._special)
        except GrammarError as error:
            return str(error)
        return ""


def _grammar_of(guided: GuidedDecodingParams, param: str, starts_after: Marker) -> Grammar | None:
    """Raises GrammarError for values that are nothing of the kind."""

    def grammar(kind: Any, spec: str = "") -> Grammar:
        return Grammar(kind=kind, spec=spec, starts_after=starts_after, param=param)

    if guided.json_object:
        return grammar("json_object")
    if guided.json is not None:
        return grammar("json_schema", _as_json(_schema_of(guided.json)))
    if guided.regex is not None:
        return grammar("regex", _text("regex", guided.regex))
    if guided.grammar is not None:
        return grammar("ebnf", _text("grammar", guided.grammar))
    if guided.choice is not None:
        return grammar("choice", _as_json(guided.choice))
    if guided.structural_tag is not None:
        return grammar("structural_tag", _as_json(guided.structural_tag))
    return None


def _schema_of(given: Any) -> Any:
    """A pydantic model's schema; anything else as it is."""
    make = getattr(given, "model_json_schema", None)
    return make() if callable(make) else given


def _as_json(given: Any) -> str:
    if isinstance(given, str):
        return given
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"can't be written as JSON: {error}") from None
    if len(text) > MAX_SPEC_BYTES:
        raise GrammarError(f"is longer than {MAX_SPEC_BYTES} bytes: shorten it")
    return text


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise GrammarError(f"{name} must be text, and not empty")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"{name} has a lone surrogate: send valid Unicode text") from None
    return given
