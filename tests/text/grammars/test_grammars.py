"""Regular expressions, EBNF, choices and structural tags on both libraries, and what is wrong with some."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.load import checker_of, compiler_of
from headrace.text.grammars.vocabulary import vocabulary_of
from headrace.text.tokenizer import ByteTokenizer
from headrace.types import Grammar
from tests.text.grammars.walk import CALL, VOCABULARY, accepts, walk

OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
A: dict[str, Any] = {"type": "tag", "begin": "<f=a>", "content": OBJECT, "end": "</f>"}
B: dict[str, Any] = {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "</g>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [A, B]}
SPECIAL = {"type": "tag", "begin": "<|call|>", "content": OBJECT, "end": "<|call|>"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compiler(request: pytest.FixtureRequest) -> Any:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    return compiler_of(request.param, VOCABULARY)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_no_end_is_among_what_may_come(backend: str) -> None:
    """Also where several of them share a word of the mask, as Llama 3's do."""
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    ends = (len(VOCABULARY.tokens) - 2, len(VOCABULARY.tokens) - 1)
    assert ends[0] // 32 == ends[1] // 32
    compiler = compiler_of(backend, replace(VOCABULARY, end_ids=ends, special={}))
    matcher = compiler.compile(Grammar(kind="regex", spec="a*")).matcher()
    bits = np.full((1, VOCABULARY.num_words), -1, np.int32)
    assert matcher.can_end and compiler.fill([matcher], bits) == {}
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    assert ord("a") in allowed and not set(ends) & set(allowed)


def tag(tree: Any) -> Grammar:
    return Grammar(kind="structural_tag", spec=json.dumps(tree))


CASES: list[tuple[Grammar, list[str], list[str]]] = [
    (Grammar(kind="regex", spec="a{2,3}/é"), ["aa/é", "aaa/é"], ["a/é", "aa", "aa/éa"]),
    (Grammar(kind="choice", spec='["a", "b\\n", "é\\""]'), ["a", "b\n", 'é"'], ["b", "é", "ab"]),
    (Grammar(kind="ebnf", spec='root ::= "x" y\ny ::= [0-9]+'), ["x12"], ["x", "12"]),
    (Grammar(kind="json_object"), ['{"a": [1, null]}', "{}"], ["[]", '{"a"}', "1"]),
    (tag(TRIGGERED), ["hi", "", "hi <f=a>{}</f> more", "<f=b>x<</g><f=a>{}</f>", "x<"],
     ["<f=a>{}", "<f=c", "<f=b>x"]),
    (tag({**TRIGGERED, "at_least_one": True}), ["<f=a>{}</f>", "<f=a>{}</f> so <f=b></f>"], ["", "hi <f=a>{}</f>"]),
    (tag({**TRIGGERED, "at_least_one": True, "stop_after_first": True}), ["<f=a>{}</f>"], ["<f=a>{}</f> ", "hi"]),
    (tag({"type": "tags_with_separator", "tags": [A, B], "separator": "\n", "at_least_one": True}),
     ["<f=a>{}</f>", "<f=a>{}</f>\n<f=b></f>"], ["", "<f=a>{}</f>\n", "<f=a>{}</f><f=a>{}</f>"]),
    (tag({"type": "sequence", "elements": [text("hey"), {"type": "or", "elements": [
        {"type": "any_text", "excludes": ["b"]}, {"type": "regex", "pattern": "[0-9]+/"}]}, text("!"),
        {"type": "grammar", "grammar": 'root ::= "a" | "b"'}]}), ["heyxy!a", "hey12/!b"], ["hey", "heyabc!a", "heyx!"]),
    (tag({"type": "sequence", "elements": [{"type": "optional", "content": text("a")}, {"type": "plus", "content":
        text("b")}, {"type": "star", "content": text("c")}, {"type": "repeat", "min": 1, "max": 2, "content":
        text("d")}]}), ["abd", "bbccdd"], ["ad", "bc", "bddd"]),
    (tag({"structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f="]}),
     ["so <f=a>{}</f>", ""], ["<f=a>", "<f=a>1"]),
    (tag({"type": "structural_tag", "format": {"type": "sequence", "elements": [text("a"), {"type": "any_text"}]}}),
     ["a", "a b\n"], ["b"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES, ids=lambda value: getattr(value, "kind", ""))
def test_exactly_these(compiler: Any, grammar: Grammar, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


def test_special_tokens_are_no_text(compiler: Any) -> None:
    """A literal that spells one means the token; free text and strings never have one."""
    grammar = tag(SPECIAL)
    assert accepts(compiler, grammar, [CALL, *b'{"a":1}', CALL])
    assert not accepts(compiler, grammar, "<|call|>{}<|call|>")
    assert not accepts(compiler, grammar, [CALL, *b'{"a":"', CALL])
    anything = tag({"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [SPECIAL]})
    assert accepts(compiler, anything, [*b"so ", CALL, *b"{}", CALL, *b"!"])
    assert not accepts(compiler, tag({"type": "any_text"}), [CALL])
    assert not accepts(compiler, Grammar(kind="regex", spec="(.|\\n)*"), [CALL])


def test_random_tags_parse(compiler: Any) -> None:
    compiled = compiler.compile(tag({**TRIGGERED, "at_least_one": True}))
    walked = [walk(compiler, compiled, seed=seed) for seed in range(6)]
    for found in walked:
        assert not found.is_whole or re.match(rb"<f=a>\s*\{.*\}</f>|<f=b>.*?</[fg]>", found.text, re.DOTALL)


BROKEN: list[tuple[Any, str, str]] = [
    ("regex", "(a|b", "unclosed"),
    ("regex", "(?=a)", "look-around"),
    ("ebnf", "root ::= foo", "foo"),
    ("ebnf", "start: foo", "foo"),
    ("choice", "[]", "empty"),
    ("choice", '["a", 1]', "/1: must be text"),
    ("json_schema", "{", "no JSON"),
    ("json_schema", "[]", "must be an object"),
    ("structural_tag", '{"type": "nope"}', "/type: the format 'nope'"),
    ("structural_tag", '{"type": "const_string", "value": 1}', "/value: must be text"),
    ("structural_tag", json.dumps({**A, "ends": 1}), "/ends: ends is not known"),
    ("structural_tag", json.dumps({**A, "content": {**OBJECT, "json_schema": {"not": {}}}}), "json_schema/not"),
    ("structural_tag", json.dumps({**TRIGGERED, "triggers": ["<g"]}), "/tags/0/begin: must begin"),
    ("structural_tag", '{"structures": [{"begin": "<a", "end": ""}]}', "triggers is missing"),
    ("structural_tag", json.dumps({"type": "sequence", "elements": [{"type": "any_text"}, OBJECT]}), "it stop"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "word"), BROKEN)
def test_broken_ones_say_why(kind: Any, spec: str, word: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(word)):
        checker_of("llguidance")(Grammar(kind=kind, spec=spec), {})


@pytest.mark.parametrize(
    "spec", ["(a{1000}){1000}", "(((a+)+)+)+b", "(a|aa|aaa)*" * 40, ".{0,5000}x.{0,5000}y.{0,5000}"]
)
def test_bombs_are_soon_over(spec: str) -> None:
    """Refused, stopped by a limit of the library, or simply harmless; never a hang."""
    compiler = compiler_of("llguidance", VOCABULARY)
    begin_s = time.monotonic()
    try:
        checker_of("llguidance")(Grammar(kind="regex", spec=spec), {})
        compiled = compiler.compile(Grammar(kind="regex", spec=spec))
        walk(compiler, compiled, seed=0, most=20)
    except (GrammarError, AssertionError):
        pass
    assert time.monotonic() - begin_s < 20


def test_a_check_needs_no_torch() -> None:
    code = (
        "import sys; from headrace.front.grammars import Grammars\n"
        "from headrace.params import GuidedDecodingParams as P\n"
        "from headrace.text.tokenizer import ByteTokenizer as T\n"
        "for name in ('llguidance', 'xgrammar'): Grammars(T(), name).build(P(json={'type': 'object'}), param='x')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_vocabulary_has_no_text_for_what_is_none() -> None:
    found = vocabulary_of(ByteTokenizer(), num_ids=258, end_ids={7})
    assert found.end_ids == (7, 257) and found.tokens[7] == b"" and found.silent_ids == {7, 256, 257}
    with pytest.raises(ValueError, match="ends the text"):
        vocabulary_of(ByteTokenizer(), num_ids=200)
