"""Structured output against `headrace serve smollm2`, through the official client: streamed, constrained, refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from .test_real import Real
from .test_service import until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
QUESTION: Any = [{"role": "user", "content": "Describe Paris as JSON."}]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("real") / "log", max_kv_tokens=8192)
    try:
        assert until(server.is_ready, timeout_s=120)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(20)


def chat(real: Real, **fields: Any) -> Any:
    fields = {"model": "smollm2", "messages": QUESTION, "max_tokens": 80, "temperature": 1, "seed": 1, **fields}
    return real.client.chat.completions.create(**fields)


def completion(real: Real, **extra: Any) -> Any:
    answer = real.client.completions.create(
        model="smollm2", prompt="Q: 2+2? A:", max_tokens=30, temperature=1, seed=3, extra_body=extra
    )
    return answer.choices[0]


def test_a_schema_streamed_and_not(real: Real) -> None:
    whole = chat(real, response_format=FORMAT).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    chunks = [chunk.choices[0] for chunk in chat(real, response_format=FORMAT, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"
    cut = chat(real, response_format=FORMAT, max_tokens=3).choices[0]
    assert cut.finish_reason == "length" and cut.message.content.lstrip().startswith("{")


def test_the_clients_own_parsing(real: Real) -> None:
    class City(pydantic.BaseModel):
        size: Literal["small", "large"]
        rank: int = pydantic.Field(ge=1, le=9)

    parsed = real.client.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=City, max_tokens=60, temperature=1, seed=2
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1}}, r"\[\s*(true|false)?\s*\]"),
        ({"guided_json": json.dumps({"enum": ["a", "b"]})}, '"[ab]"'),
        ({"guided_regex": "[0-9]{3}-[a-c]"}, "[0-9]{3}-[a-c]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "<" [a-z] ">"'}, "<[a-z]>"),
        ({"guided_decoding": {"regex": "[x-z]{2}"}}, "[x-z]{2}"),
        ({"response_format": {"type": "regex", "regex": "[0-9]"}}, "[0-9]"),
        ({"response_format": {"type": "ebnf", "ebnf": 'start: "a" /[0-9]/'}}, "a[0-9]"),
        ({"response_format": {"type": "json", "schema": {"const": 5}}}, "5"),
        ({"response_format": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}}},
         "<n>[0-9]{2}</n>"),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)  # fmt: skip
def test_every_form(real: Real, fields: dict[str, Any], pattern: str) -> None:
    found = completion(real, **fields)
    assert re.fullmatch(pattern, found.text, re.DOTALL), found.text
    assert found.finish_reason == "stop" or pattern == ".*"


def test_json_object_and_finite_log_probabilities(real: Real) -> None:
    found = chat(real, response_format={"type": "json_object"}, logprobs=True, top_logprobs=5, max_tokens=16).choices[0]
    assert found.message.content.startswith("{")
    values = [top.logprob for entry in found.logprobs.content for top in (entry, *entry.top_logprobs)]
    assert all(-9999 <= value <= 0 for value in values)


def test_eight_schemas_at_once_and_choices(real: Real) -> None:
    def one(index: int) -> str:
        schema = {"type": "object", "properties": {f"k{index}": {"enum": [index]}}, "required": [f"k{index}"],
                  "additionalProperties": False}  # fmt: skip
        return completion(real, guided_json=schema, n=1).text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, range(8)))
    assert [json.loads(text) for text in texts] == [{f"k{index}": index} for index in range(8)]
    many = real.client.completions.create(
        model="smollm2", prompt="Digit:", n=3, temperature=1, max_tokens=8, extra_body={"guided_regex": "[0-9]"}
    )
    assert all(re.fullmatch("[0-9]", choice.text) for choice in many.choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": {}, "not": {}}}}},
         "response_format", "/a"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format", "unclosed"),
        ({"guided_json": {"properties": {"q": {"format": "iri"}}}}, "guided_json", "/properties/q/format"),
        ({"guided_grammar": "start: <nobody>"}, "guided_grammar", "nobody"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex", "beam"),
    ],
)  # fmt: skip
def test_refusals_before_the_first_byte(real: Real, fields: Any, param: str, word: str, stream: bool) -> None:
    """The fourth is found by the engine, which knows the vocabulary; the answer is the same."""
    body = {"model": "smollm2", "prompt": "a", "max_tokens": 4, "stream": stream, **fields}
    answer = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and word in error["message"] and error["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        completion(real, **fields)


BANNED: dict[str, Any] = {"bad": ["7", "8"]}
"""With it the grammars below have no token to go on with: at once, or behind "a"."""


@pytest.mark.parametrize("api", ["completions", "chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_left(real: Real, api: str, stream: bool) -> None:
    """The request's own fault, found by the engine: a 400 with a code of its own, or the last event of a stream."""
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "a", "max_tokens": 9},
        "chat/completions": {"messages": QUESTION, "max_tokens": 9},
        "responses": {"input": "a", "max_output_tokens": 9},
        "messages": {"messages": QUESTION, "max_tokens": 9},
    }
    body = {**bodies[api], "guided_regex": "[78]", "stream": stream, **BANNED}
    at_once = httpx.post(f"{real.url}/v1/{api}", json=body, timeout=60)
    assert at_once.status_code == 400, at_once.text
    error = at_once.json()["error"]
    assert (error["param"], error["code"], error["type"]) == ("guided_regex", "no_token_left", "invalid_request_error")
    assert "no token is left" in error["message"]
    later = httpx.post(f"{real.url}/v1/{api}", json={**body, "guided_regex": "aaaa[78]"}, timeout=60)
    assert later.status_code == (200 if stream else 400)
    if stream:
        assert [line for line in later.text.splitlines() if "data: {" in line][-1].count("no token is left") == 1


def test_a_bomb_harms_nobody(real: Real) -> None:
    with ThreadPoolExecutor(2) as pool:
        bomb = pool.submit(completion, real, guided_regex="(a{1000}){1000}b")
        assert completion(real, guided_regex="[0-9]").text.isdigit()
        assert bomb.exception() is None or isinstance(bomb.exception(), openai.BadRequestError)
