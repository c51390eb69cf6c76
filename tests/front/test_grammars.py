"""A caller's constraint -> the grammar of a request, and its refusals before any device work."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from headrace.front.builder import RequestOptions
from headrace.front.errors import RequestError
from headrace.params import GuidedDecodingParams
from headrace.types import Grammar
from tests.front.making import TOKENIZER, build, make_builder

PROMPT = [1, 2, 3]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Model(pydantic.BaseModel):
    a: int


@pytest.mark.parametrize(
    ("guided", "kind", "spec"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "é"'}, "ebnf", 'root ::= "é"'),
        ({"choice": ["é"]}, "choice", '["é"]'),
        ({"structural_tag": {"type": "any_text"}}, "structural_tag", '{"type": "any_text"}'),
    ],
)
def test_every_constraint(guided: dict[str, Any], kind: Any, spec: str) -> None:
    options = RequestOptions(grammar_param="response_format", grammar_starts_after=((5, 7), (6,)))
    requests = build(PROMPT, guided_decoding=GuidedDecodingParams(**guided), options=options, n=2)
    expected = Grammar(kind=kind, spec=spec, starts_after=((5, 7), (6,)), param="response_format")
    assert [request.grammar for request in requests] == [expected, expected]


def test_a_pydantic_model_and_nothing() -> None:
    requests = build(PROMPT, guided_decoding=GuidedDecodingParams(json=Model))
    assert requests[0].grammar is not None and json.loads(requests[0].grammar.spec)["required"] == ["a"]
    assert build(PROMPT, guided_decoding=GuidedDecodingParams())[0].grammar is None


@pytest.mark.parametrize(
    ("guided", "word"),
    [
        ({"json": {"not": {}}}, "guided_json: /not: the keyword 'not' is not enforced"),
        ({"json": {"a": {1, 2}}}, "can't be written as JSON"),
        ({"json": {"const": float("nan")}}, "can't be written as JSON"),
        ({"regex": ""}, "not empty"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "("}, "unclosed"),
        ({"choice": []}, "empty"),
        ({"structural_tag": "{"}, "no JSON"),
    ],
)
def test_refusals_name_the_field(guided: dict[str, Any], word: str) -> None:
    builder = make_builder()
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError) as error:
            build(PROMPT, builder, guided_decoding=GuidedDecodingParams(**guided),
                  options=RequestOptions(grammar_param="guided_json"))  # fmt: skip
        assert error.value.param == "guided_json" and word in error.value.message and error.value.status == 400


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="regex and json_object: keep one"):
        GuidedDecodingParams(regex="a", json_object=True)
    both = GuidedDecodingParams(regex="a")
    both.json_object = True
    with pytest.raises(RequestError, match="keep one"):
        build(PROMPT, guided_decoding=both)
    with pytest.raises(RequestError, match="beam search"):
        build(PROMPT, make_builder(), guided_decoding=GuidedDecodingParams(regex="a"), use_beam_search=True, n=2)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        build(PROMPT, make_builder(tokenizer=None), guided_decoding=GuidedDecodingParams(regex="a"))
    with pytest.raises(RequestError, match="GuidedDecodingParams, got dict"):
        build(PROMPT, guided_decoding={"regex": "a"})


def test_the_backend_decides_what_is_enforced() -> None:
    guided = GuidedDecodingParams(json={"type": "object", "patternProperties": {"^a": {}}})
    assert build(PROMPT, guided_decoding=guided)[0].grammar
    with pytest.raises(RequestError, match="not enforced by xgrammar"):
        build(PROMPT, make_builder(tokenizer=TOKENIZER, grammar_backend="xgrammar"), guided_decoding=guided)
