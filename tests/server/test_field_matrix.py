"""Every field beyond OpenAI's, on every API: a good value reaches the engine (or the answer), a bad one is a 400 that
names the field as `param`, streamed or not. One table: a new field is a new row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from headrace.seeds import child_seed
from headrace.server.bodies import GenerationBody
from headrace.types import Request

from .field_kit import BODIES, BOS, CHAT, COMPLETIONS, EOS, MESSAGES, NO_INT, RESPONSES, SAID, Served, serve
from .harness import Server

ALL, CHATS, LISTS = tuple(BODIES), (CHAT, RESPONSES, MESSAGES), (CHAT, COMPLETIONS)
NO_FLOAT = ('"x"', "NaN", "Infinity", "true", "1e39", "[]")
NO_BOOL = ('"yes"', "1", "NaN", "[]")
NO_TEXT = ("5", "[]", "{}", "true")


class Asked(NamedTuple):
    """What became of a request."""

    requests: list[Request]
    answer: Any
    text: str

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def prompt(self) -> str:
        return bytes(token for token in self.request.prompt if token < BOS).decode()


class Field(NamedTuple):
    good: Any
    holds: Callable[[Asked], bool]
    bad: tuple[str, ...]
    """JSON texts."""
    more: dict[str, Any] = {}
    """What goes with the good value."""
    apis: tuple[str, ...] = ALL


def grammar(kind: str, text: str) -> Callable[[Asked], bool]:
    """At the engine, alone or within the tree that waits for the end of the reasoning."""
    return lambda asked: (
        (found := asked.request.grammar) is not None and found.kind == kind and text in found.spec
    )  # fmt: skip


def shown(name: str, value: Any) -> Callable[[Asked], bool]:
    """In the answer or in its first choice."""
    return lambda asked: value == ({**asked.answer, **asked.answer.get("choices", [{}])[0]}).get(name)


TIMES = {"queue_ms", "prefill_ms", "decode_ms"}
RETENTION = {"token_range_retention_configs": [{"token_start": 0, "token_end": 1, "priority": 90}]}
FIELDS: dict[str, Field] = {
    "top_k": Field(7, lambda a: a.request.sampling.top_k == 7, (*NO_INT, "-2", "3000000000")),
    "min_p": Field(0.25, lambda a: a.request.sampling.min_p == 0.25, (*NO_FLOAT, "-0.1", "1.1")),
    "repetition_penalty": Field(
        1.5, lambda a: a.request.sampling.repetition_penalty == 1.5, (*NO_FLOAT, "0", "-1")
    ),
    "min_tokens": Field(
        6, lambda a: a.request.min_tokens == 6 and a.text == "abcd", (*NO_INT, "-1", "41"), {"stop_token_ids": [101]}
    ),
    "ignore_eos": Field(True, lambda a: a.request.stop_ids == () and a.text.startswith("abcdef"), NO_BOOL),
    "stop_token_ids": Field(
        [99], lambda a: a.request.stop_ids == (99, EOS) and a.text == "ab",
        ("5", '["a"]', "[-1]", "[99999]", "[NaN]", "[1.5]", "[true]", json.dumps([1] * 257)),
    ),
    "include_stop_str_in_output": Field(True, lambda a: a.text == "abc", NO_BOOL, {"stop_token_ids": [99]}),
    "skip_special_tokens": Field(False, lambda a: a.text.startswith("<bos>abc"), NO_BOOL),
    "bad": Field(
        ["no", "never"], lambda a: tuple(b"no") in a.request.sampling.bad_words,
        ("5", '[""]', "[5]", '""', json.dumps(["x"] * 1025)),
    ),
    "bad_token_ids": Field(
        [65], lambda a: a.request.sampling.bad_words == ((65,),), ("5", "[-1]", "[99999]", "[1.5]", '["a"]')
    ),
    "prompt_logprobs": Field(
        2, lambda a: a.request.sampling.prompt_logprobs == 2 and prompt_logprobs_of(a) == len(a.request.prompt),
        (*NO_INT, "-1", "21"),
    ),
    "return_token_ids": Field(
        True, lambda a: shown("token_ids", SAID[:5])(a) and prompt_ids_of(a) == a.request.prompt, NO_BOOL
    ),
    "cache_salt": Field("mine", lambda a: a.request.cache_salt == "mine", (*NO_TEXT, '""', json.dumps("x" * 2000))),
    "priority": Field(0.75, lambda a: a.request.priority == 0.75, (*NO_FLOAT, "-0.1", "1.1")),
    "timeout": Field(9.5, lambda a: a.request.timeout_s == 9.5, (*NO_FLOAT, "0", "-1")),
    "kv_cache_retention_config": Field(
        RETENTION, lambda a: a.request.retention is not None and a.request.retention.ranges[0].priority == 90,
        ("5", '"x"', '{"nope": 1}', '{"decode_retention_priority": 101}', '{"decode_duration_ms": NaN}',
         '{"decode_duration_ms": Infinity}', '{"token_range_retention_configs": 5}',
         '{"token_range_retention_configs": [{"token_start": -1, "priority": 5}]}',
         '{"token_range_retention_configs": [{"token_start": 9999, "priority": 5}]}'),
    ),
    "chat_template_kwargs": Field(
        {"suffix": "!"}, lambda a: a.prompt.endswith("!"), ("5", '"x"', "[]", '{"chat_template": "x"}'), apis=CHATS
    ),
    "reasoning_effort": Field("high", lambda a: a.prompt.endswith("high"), (*NO_TEXT, '"enormous"'), apis=CHATS),
    "guided_json": Field(
        {"type": "object", "properties": {"x": {"type": "integer"}}}, grammar("json_schema", '"x"'),
        ("5", "[]", '"{"', '{"type": "no-such"}'),
    ),
    "guided_regex": Field("[0-9]+", grammar("regex", "[0-9]+"), (*NO_TEXT, '"("', '""')),
    "guided_grammar": Field('start: "yes"', grammar("ebnf", "yes"), (*NO_TEXT, '"start: ("', '""')),
    "guided_choice": Field(["yes", "no"], grammar("choice", "yes"), ("5", '"a"', "[]", "[5]", "{}")),
    "logit_bias": Field(
        {"65": -3}, lambda a: a.request.sampling.logit_bias == {65: -3.0},
        ("5", "[]", '{"a": 1}', '{"1": 101}', '{"1": NaN}', '{"99999": 1}', '{"-1": 1}', '{"1": "x"}', '{"1": null}'),
    ),
    "seed": Field(7, lambda a: a.request.sampling.seed == child_seed(7, 0), ('"x"', "1.5", "NaN", "true")),
    "n": Field(
        2, lambda a: len(a.requests) == len(a.answer["choices"]) == 2, (*NO_INT, "0", "-1", "129"), apis=LISTS
    ),
    "best_of": Field(3, lambda a: len(a.requests) == 3, (*NO_INT, "0", "-1", "129")),
    "response_format": Field(
        {"type": "json_object"}, lambda a: (a.request.grammar is not None and a.request.grammar.kind == "json_object"),
        ("5", '"json_object"', '{"type": "no-such"}', '{"type": "json_schema"}', '{"type": "regex", "regex": "("}'),
        apis=LISTS,
    ),
    "guided_decoding": Field({"regex": "[a-z]"}, grammar("regex", "[a-z]"),
                             ("5", '"x"', '{"nope": 1}', '{"regex": "("}', '{"regex": "a", "choice": ["b"]}')),
    "temperature": Field(0.5, lambda a: a.request.sampling.temperature == 0.5, (*NO_FLOAT, "-1")),
    "top_p": Field(0.5, lambda a: a.request.sampling.top_p == 0.5, (*NO_FLOAT, "-0.1", "1.1")),
    "presence_penalty": Field(0.5, lambda a: a.request.sampling.presence_penalty == 0.5, (*NO_FLOAT, "2.1", "-2.1")),
    "frequency_penalty": Field(0.5, lambda a: a.request.sampling.frequency_penalty == 0.5, (*NO_FLOAT, "2.1", "-2.1")),
    "no_repeat_ngram_size": Field(3, lambda a: a.request.sampling.no_repeat_ngram_size == 3, (*NO_INT, "-1")),
    "prompt_ignore_length": Field(3, lambda a: a.request.sampling.prompt_ignore_length == 3, (*NO_INT, "-1")),
    "truncate_prompt_tokens": Field(2, lambda a: len(a.request.prompt) == 2, (*NO_INT, "0", "-1")),
    "length_penalty": Field(
        2.0, lambda a: a.request.beam is not None and a.request.beam.length_penalty == 2.0, (*NO_FLOAT, "11", "-11"),
        {"best_of": 2, "use_beam_search": True},
    ),
    "early_stopping": Field(
        "never", lambda a: a.request.beam is not None and a.request.beam.early_stopping == 2,
        ('"sometimes"', "3", "-1", "NaN", "[]"), {"best_of": 2, "use_beam_search": True},
    ),
    "conversation_params": Field(
        {"conversation_id": "c1"}, lambda a: a.request.conversation == "c1",
        ("5", '"x"', '{"conversation_id": 5}', '{"conversation_id": ""}'),
    ),
    "return_timing": Field(True, lambda a: set(a.answer["usage"]["timing"]) == TIMES, NO_BOOL),
    "use_beam_search": Field(
        True, lambda a: a.request.beam is not None and a.request.beam.width == 2, NO_BOOL, {"best_of": 2}
    ),
}  # fmt: skip


def prompt_logprobs_of(asked: Asked) -> int:
    answer = asked.answer
    return len({**answer, **answer.get("choices", [{}])[0]}["prompt_logprobs"])


def prompt_ids_of(asked: Asked) -> list[int]:
    answer = asked.answer
    return {**answer, **answer.get("choices", [{}])[0]}["prompt_token_ids"]


def post(server: Server, client: httpx.Client, api: str, body: str) -> httpx.Response:
    return client.post(server.url + api, content=body)


def asked(served: Served, client: httpx.Client, api: str, **fields: Any) -> Asked:
    served.requests.clear()
    response = post(served.server, client, api, json.dumps({**BODIES[api], **fields}))
    assert response.status_code == 200, response.text
    assert "x-headrace-warnings" not in response.headers
    answer = response.json()
    return Asked(list(served.requests), answer, text_of(api, answer))


def text_of(api: str, answer: Any) -> str:
    if api == CHAT:
        return answer["choices"][0]["message"]["content"]
    if api == COMPLETIONS:
        return answer["choices"][0]["text"]
    return (answer["output"] if api == RESPONSES else [answer])[0]["content"][0]["text"]


def refused(served: Served, client: httpx.Client, api: str, name: str, value: str, *, param: str = "") -> str:
    """What the error says, the same for streams; nothing has reached the engine."""
    accepted = served.server.service.counters.accepted
    said: set[str] = set()
    for stream in (False, True):
        body = json.dumps({**BODIES[api], "stream": stream})
        response = post(served.server, client, api, f'{body[:-1]}, "{name}": {value}}}')
        assert response.status_code == 400, (value, response.text)
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param or name), (value, error)
        assert "\n" not in error["message"] and len(error["message"]) < 400, error
        said.add(error["message"])
    assert served.server.service.counters.accepted == accepted
    (message,) = said
    return message


CASES = [(api, name) for name, field in FIELDS.items() for api in field.apis]


@pytest.mark.parametrize(("api", "name"), CASES)
def test_a_good_value_has_its_effect(served: Served, client: httpx.Client, api: str, name: str) -> None:
    field = FIELDS[name]
    found = asked(served, client, api, **{name: field.good}, **field.more)
    assert field.holds(found), (found.requests, found.answer)
    plain = asked(served, client, api, **field.more)  # the check tells the value from its absence
    assert not holds(field, plain), name
    null = asked(served, client, api, **{name: None}, **field.more)
    assert null.text == plain.text and not holds(field, null)


def holds(field: Field, found: Asked) -> bool:
    try:
        return field.holds(found)
    except (KeyError, AttributeError, IndexError, TypeError):
        return False


@pytest.mark.parametrize(("api", "name"), CASES)
def test_a_bad_value_is_named(served: Served, client: httpx.Client, api: str, name: str) -> None:
    for value in FIELDS[name].bad:
        assert name in refused(served, client, api, name, value), value


def test_every_field_has_a_row() -> None:
    elsewhere = {"model", "max_tokens", "stop", "stream", "stream_options", "detokenize", "add_special_tokens",
                 "spaces_between_special_tokens", "thinking_token_budget"}  # fmt: skip
    assert {*GenerationBody.model_fields} - elsewhere <= {*FIELDS}


@pytest.mark.parametrize("api", ALL)
def test_streams_tell_of_ids_too(served: Served, client: httpx.Client, api: str) -> None:
    served.requests.clear()
    text = post(served.server, client, api, json.dumps({**BODIES[api], "stream": True, "return_token_ids": True})).text
    datas = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    ids: list[int] = []
    prompts: list[list[int]] = []
    for event in map(json.loads, datas):
        for told in (event, event.get("response", {}), event.get("message", {}), *event.get("choices", ())):
            ids += told.get("token_ids", [])
            prompts += [told["prompt_token_ids"]] if "prompt_token_ids" in told else []
    assert ids == SAID[:5] and prompts == [served.requests[0].prompt]


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES])
def test_one_choice_is_all_there_is(served: Served, client: httpx.Client, api: str) -> None:
    assert len(asked(served, client, api, n=1).requests) == 1
    for value in ("2", "0", '"x"', "true"):
        assert refused(served, client, api, "n", value).startswith("n")
    three = {**BODIES[api], "best_of": 3, "stream": True}
    assert post(served.server, client, api, json.dumps(three)).json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("name", ["chat_template_kwargs", "reasoning_effort"])
def test_what_a_completion_has_no_use_for_is_told(served: Served, client: httpx.Client, name: str) -> None:
    response = post(served.server, client, COMPLETIONS, json.dumps({**BODIES[COMPLETIONS], name: FIELDS[name].good}))
    assert response.status_code == 200 and response.headers["x-headrace-warnings"] == f"unknown fields: {name}"


OWN: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "effort of responses": (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning_effort", "reasoning.effort"),
    "effort of messages": (MESSAGES, {"output_config": {"effort": "high"}}, "reasoning_effort", "output_config"),
}


@pytest.mark.parametrize("name", OWN)
def test_an_apis_own_spelling(served: Served, client: httpx.Client, name: str) -> None:
    """It works, names itself in errors, and may not contradict the other one."""
    api, fields, other, param = OWN[name]
    ((outer, inner),) = fields.items()
    assert asked(served, client, api, **fields).prompt.endswith("high")
    assert asked(served, client, api, **fields, **{other: "high"}).prompt.endswith("high")
    bad = json.dumps(dict.fromkeys(inner, "enormous"))
    assert refused(served, client, api, outer, bad, param=param).startswith(param)
    both = post(served.server, client, api, json.dumps({**BODIES[api], **fields, other: "low"}))
    assert both.status_code == 400 and f"{other} and {param} differ" in both.json()["error"]["message"]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("thinking"), reasoning_parser="deepseek_r1") as found:
        yield found


@pytest.mark.parametrize("api", ALL)
def test_budgets_of_reasoning(thinking: Served, client: httpx.Client, api: str) -> None:
    thinking.requests.clear()
    body = {**BODIES[api], "thinking_token_budget": 5}
    assert post(thinking.server, client, api, json.dumps(body)).status_code == 200
    cap = thinking.requests[0].thinking
    assert cap is not None and cap.max_tokens == 5
    for value in (*NO_INT, "-1", "1000000000", "40"):
        message = refused(thinking, client, api, "thinking_token_budget", value)
        assert message.startswith("thinking_token_budget"), message


def test_budgets_of_messages(thinking: Served, client: httpx.Client) -> None:
    for value in ("NaN", "0", '"x"', "-5", "1.5"):
        assert "budget_tokens" in refused(
            thinking, client, MESSAGES, "thinking", f'{{"type": "enabled", "budget_tokens": {value}}}'
        )
    text = refused(thinking, client, MESSAGES, "thinking", '{"type": "enabled", "budget_tokens": 40}',
                   param="thinking.budget_tokens")  # fmt: skip
    assert text.startswith("thinking.budget_tokens 40")
    body = {**BODIES[MESSAGES], "thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6}
    said = post(thinking.server, client, MESSAGES, json.dumps(body)).json()["error"]
    assert "thinking_token_budget and thinking.budget_tokens differ" in said["message"]
