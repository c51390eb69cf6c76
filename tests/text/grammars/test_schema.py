"""Every keyword is enforced or refused with its place: random texts of many schemas, held to a validator."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from headrace.text.grammars.errors import GrammarError
from headrace.text.grammars.load import checker_of, compiler_of
from headrace.types import Grammar
from tests.text.grammars.walk import VOCABULARY, walk

BACKENDS = ["llguidance", "xgrammar"]


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {}), **more}


INT, TEXT = {"type": "integer"}, {"type": "string"}
NODE = obj({"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "v", additionalProperties=False)
SCHEMAS: list[Any] = [
    True, {}, *({"type": kind} for kind in ("object", "array", "string", "number", "boolean", "null")),
    {"type": ["string", "null"]}, obj({"a": INT, "b": TEXT}, "a"), obj({"a": INT}, "a", additionalProperties=False),
    obj({"a": INT}, "z"), obj({"a": INT}, additionalProperties={"type": "boolean"}), obj({'a"b': INT}, 'a"b'),
    {"type": "object", "additionalProperties": INT, "minProperties": 1}, {"type": "object", "maxProperties": 1},
    obj({"a": INT, "b": {}}, "a", "b", minProperties=2), {"type": "object", "minProperties": 3},
    {"type": "array", "items": INT, "minItems": 2, "maxItems": 4}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [INT, TEXT], "items": False},
    {"type": "array", "prefixItems": [INT], "minItems": 2},
    {"type": "string", "minLength": 3}, {"type": "string", "maxLength": 2}, {"maxLength": 2}, {"required": ["a"]},
    *({"type": "string", "pattern": pattern} for pattern in ("^[a-z]+$", "b", "a.c", r"^\d{3}-\w+", r"\.$", "^[^x]*$",
                                                            r'^"q\\$', r"^\s+$", "a|b", "^a|b$", "^é+$")),
    {"type": "string", "pattern": "^(a|b)*$", "maxLength": 3},
    {"type": "string", "minLength": 1, "pattern": "^[a-c]*$"},
    *({"type": "string", "format": name} for name in ("date-time", "time", "date", "email", "ipv4", "uuid", "uri")),
    {"type": "string", "format": "date", "pattern": "^2"}, {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, {"type": "integer", "multipleOf": 5, "minimum": 7},
    {"type": "number", "minimum": -1.5, "maximum": 2.25}, {"minimum": 5}, {"enum": ["a", 1, None, {"x": [1]}, 'é\n"']},
    {"type": "string", "enum": ["a", 1]}, {"enum": [1, 2, 3], "minimum": 2}, {"const": {"a": [True]}},
    {"anyOf": [INT, TEXT]}, {"anyOf": [INT, TEXT], "minimum": 5}, {"oneOf": [INT, TEXT]},
    {"type": "object", "anyOf": [{"required": ["k"]}, {"required": ["z"]}]},
    {"allOf": [obj({"a": INT}, "a"), obj({"b": TEXT}, "b")]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"$ref": "#/$defs/n", "$defs": {"n": NODE}}, {"$ref": "#/$defs/x", "maximum": 4, "$defs": {"x": INT}},
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}},
    {"type": "object", "patternProperties": {"^a": INT}, "additionalProperties": False},
    obj({"ab": TEXT}, patternProperties={"^a": {"minLength": 3}}), obj({"a": False}, additionalProperties=False),
    {"not": TEXT}, {"if": TEXT, "then": {"maxLength": 1}}, {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": INT}, {"propertyNames": {"pattern": "^a"}}, {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
]  # fmt: skip


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    return request.param, compiler_of(request.param, VOCABULARY)


def test_what_ends_validates(backend: Any) -> None:
    """And most of the schemas are enforced, not refused."""
    name, compiler = backend
    num_enforced = 0
    for schema in SCHEMAS:
        grammar = Grammar(kind="json_schema", spec=json.dumps(schema))
        try:
            checker_of(name)(grammar, {})
            compiled = compiler.compile(grammar)
        except GrammarError:
            continue
        num_enforced += 1
        for seed in range(5):
            text, is_whole = walk(compiler, compiled, seed=seed, most=120)
            if is_whole:
                document = json.loads(text.decode(errors="replace"))
                errors = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
                assert not errors, f"{schema}: {text!r}: {errors[0].message}"
    assert num_enforced >= (55 if name == "llguidance" else 30)


REFUSED: list[tuple[Any, str, str]] = [
    (obj({"a/b": {"type": "array", "items": {"not": {}}}}), "/properties/a~1b/items/not", "'not'"),
    ({"if": {}, "then": {}}, "/if", "anyOf"),
    ({"anyOf": [{}, {"uniqueItems": True}]}, "/anyOf/1/uniqueItems", "uniqueItems"),
    ({"$defs": {"x": {"nullable": True}}}, "/$defs/x/nullable", "null"),
    ({"type": "string", "format": "iri"}, "/format", "iri"),
    ({"type": "array", "items": [INT]}, "/items", "prefixItems"),
    ({"$ref": "http://example.com/x"}, "/$ref", "not in this schema"),
    ({"$ref": "#/$defs/x"}, "/$ref", "not there"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "/$ref", "itself"),
    ({"$defs": {"x": {"$id": "y"}}}, "/$defs/x/$id", "$id"),
    ({"x-guidance": {"lenient": True}}, "/x-guidance", "x-guidance"),
    ({"minLenght": 3}, "/minLenght", "not enforced"),
    ({"type": "strin"}, "/type", "strin"),
    ({"type": "array", "maxItems": 10**9}, "/maxItems", "at most"),
    ({"type": "string", "minLength": -1}, "/minLength", "from 0"),
    ({"exclusiveMinimum": True}, "/exclusiveMinimum", "number"),
    ({"type": "object", "minProperties": 2}, "/minProperties", "required"),
    ({"properties": []}, "/properties", "object of schemas"),
    ({"enum": []}, "/enum", "list of values"),
    ({"required": "a"}, "/required", "names"),
    ({"anyOf": []}, "/anyOf", "list of schemas"),
    ({"items": 3}, "/items", "true or false"),
    (False, "", "nothing matches"),
]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("schema", "pointer", "word"), REFUSED, ids=str)
def test_refusals_name_the_place(name: Any, schema: Any, pointer: str, word: str) -> None:
    """The check needs neither a vocabulary nor, for xgrammar, the library."""
    with pytest.raises(GrammarError) as error:
        checker_of(name)(Grammar(kind="json_schema", spec=json.dumps(schema)), {})
    assert error.value.pointer == pointer or (name == "xgrammar" and error.value.pointer.startswith(pointer[:4]))
    assert word in str(error.value) or name == "xgrammar"


def test_the_librarys_own_errors_have_a_place() -> None:
    for inner, word in (({"type": "string", "pattern": "(?=a)"}, "look-around"),
                        ({"oneOf": [{"type": "number"}, INT]}, "oneOf")):  # fmt: skip
        schema = obj({"q": {"type": "array", "items": inner}})
        with pytest.raises(GrammarError, match=word) as error:
            checker_of("llguidance")(Grammar(kind="json_schema", spec=json.dumps(schema)), {})
        assert error.value.pointer == "/properties/q/items"


def test_annotations_are_let_pass() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", "title": "T",
        "x-order": 1, "discriminator": {"propertyName": "t"},
        "properties": {"a": {"default": {"not": 1}, "examples": [{"if": 1}], "description": "d", "uniqueItems": False}},
    }  # fmt: skip
    checker_of("llguidance")(Grammar(kind="json_schema", spec=json.dumps(schema)), {})


def test_a_name_cant_be_spelt_twice(backend: Any) -> None:
    """`\\u0061` is `a`: a second `a` would go round the first one's schema."""
    from tests.text.grammars.walk import accepts

    _, compiler = backend
    grammar = Grammar(kind="json_schema", spec=json.dumps(obj({"a": INT}, "a")))
    assert accepts(compiler, grammar, '{"a":1}')
    assert not accepts(compiler, grammar, '{"a":1,"\\u0061":null}')
    assert not accepts(compiler, grammar, '{"a":1,"a":null}')


def test_size_and_depth() -> None:
    """64 KB compile in no time; what is nested too deep or too long is refused."""
    check = checker_of("llguidance")
    wide = obj({f"name_{index}": {"type": "string", "maxLength": 20} for index in range(1500)})
    assert len(json.dumps(wide)) > 65_536
    check(Grammar(kind="json_schema", spec=json.dumps(wide)), {})
    deep: Any = INT
    for _ in range(50):
        deep = {"type": "array", "items": deep}
    check(Grammar(kind="json_schema", spec=json.dumps(deep)), {})
    for _ in range(20):
        deep = {"type": "array", "items": deep}
    with pytest.raises(GrammarError, match="nested"):
        check(Grammar(kind="json_schema", spec=json.dumps(deep)), {})
    with pytest.raises(GrammarError, match="no JSON"):
        check(Grammar(kind="json_schema", spec="[" * 100_000), {})
    with pytest.raises(GrammarError, match="longer than"):
        check(Grammar(kind="json_schema", spec=json.dumps({"title": "x" * (2 << 20)})), {})
