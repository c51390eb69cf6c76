"""The official client against the server, over a runtime that repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from .harness import MODEL, Server, events_of

HI: Any = [{"role": "user", "content": "hé €"}]
PROMPT = "[user] hé €\n[assistant] "


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=20)


def refused(server: Server, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error, which must be the same plain JSON with and without streaming."""
    found = [post(server, path, **body, stream=stream) for stream in (False, True)]
    for response in found:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
    assert found[0].json() == found[1].json()
    error = found[0].json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


class TestChat:
    def test_answer(self, server: Server) -> None:
        answer = server.client.chat.completions.create(model=MODEL, messages=HI, max_tokens=11, temperature=0)
        assert answer.choices[0].message.content == PROMPT.encode()[:11].decode()
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        num_prompt = len(PROMPT.encode())
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 11)
        assert usage.total_tokens == num_prompt + 11
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert usage.completion_tokens_details is not None and usage.completion_tokens_details.reasoning_tokens == 0

    @pytest.mark.parametrize("max_tokens", [1, 8, 30])
    def test_stream(self, server: Server, max_tokens: int) -> None:
        """8 tokens end inside a character."""
        create = server.client.chat.completions.create
        whole = create(model=MODEL, messages=HI, max_tokens=max_tokens)
        chunks = list(
            create(model=MODEL, messages=HI, max_tokens=max_tokens, stream=True,
                   stream_options={"include_usage": True})
        )  # fmt: skip
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert len({chunk.id for chunk in chunks}) == 1

    def test_the_events_of_a_stream(self, server: Server) -> None:
        body = {"model": MODEL, "messages": HI, "max_tokens": 3, "stream": True}
        events = events_of(post(server, "chat/completions", **body).text)
        assert events[-1] == "[DONE]" and all("usage" not in event for event in events[:-1])
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        events = events_of(post(server, "chat/completions", **body).text)
        assert [event["usage"]["completion_tokens"] for event in events[1:-1]][-1] == 3

    def test_stop_strings_never_show(self, server: Server) -> None:
        for stop, text in ((["sist", "zz"], PROMPT[: PROMPT.index("sist")]), ("€", "[user] hé ")):
            whole = server.client.chat.completions.create(model=MODEL, messages=HI, max_tokens=200, stop=stop)
            assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "stop"
            assert whole.choices[0].model_extra == {"stop_reason": stop if isinstance(stop, str) else stop[0]}
            stream = server.client.chat.completions.create(
                model=MODEL, messages=HI, max_tokens=200, stop=stop, stream=True
            )
            chunks = list(stream)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
            assert chunks[-1].choices[0].finish_reason == "stop"

    def test_choices(self, server: Server) -> None:
        whole = server.client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, n=5)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4]
        assert whole.usage is not None and whole.usage.prompt_tokens == len(PROMPT.encode())
        assert whole.usage.completion_tokens == 20
        stream = server.client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, n=3, stream=True)
        texts = dict.fromkeys(range(3), "")
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == dict.fromkeys(range(3), "[use")

    def test_logprobs(self, server: Server) -> None:
        create = server.client.chat.completions.create
        whole = create(model=MODEL, messages=HI, max_tokens=10, logprobs=True, top_logprobs=2)
        content = whole.choices[0].logprobs.content if whole.choices[0].logprobs else None
        assert content is not None and len(content) == 10
        assert [entry.token for entry in content][-3:] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
        assert content[-1].bytes == [0xA9]
        assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.0]
        streamed: list[Any] = []
        for chunk in create(model=MODEL, messages=HI, max_tokens=10, logprobs=True, top_logprobs=2, stream=True):
            if chunk.choices[0].logprobs:
                streamed += chunk.choices[0].logprobs.content or []
        assert streamed == content

    def test_the_default_length_is_the_context(self, server: Server) -> None:
        answer = server.client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.usage is not None and answer.usage.total_tokens == 4096

    def test_extension_fields(self, server: Server) -> None:
        extra = {"min_tokens": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [ord("r")],
                 "include_stop_str_in_output": True, "return_token_ids": True, "seed": 3, "priority": 0.9,
                 "cache_salt": "s", "skip_special_tokens": False, "ignore_eos": True, "prompt_logprobs": 0,
                 "logit_bias": {"65": 1.5}, "chat_template_kwargs": {"suffix": "!"}}  # fmt: skip
        response = post(server, "chat/completions", model=MODEL, messages=HI, max_tokens=99, **extra)
        body = response.json()
        choice = body["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("[user", ord("r"))
        assert choice["token_ids"] == list(b"[user") and body["prompt_token_ids"] == list((PROMPT + "!").encode())
        assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len((PROMPT + "!").encode())
        assert "x-headrace-warnings" not in response.headers

    def test_content_parts_and_the_developer_role(self, server: Server) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages: Any = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
        answer = server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=26)
        assert answer.choices[0].message.content == "[system] x\n[user] a\nb\n[ass"

    def test_beam_search(self, server: Server) -> None:
        body = {"model": MODEL, "messages": HI, "max_tokens": 4, "use_beam_search": True, "n": 2, "best_of": 2}
        assert [c["message"]["content"] for c in post(server, "chat/completions", **body).json()["choices"]] == [
            "[use", "[us"]  # fmt: skip
        events = events_of(post(server, "chat/completions", **body, stream=True).text)
        assert {e["choices"][0]["index"] for e in events[:-1]} == {0, 1}


class TestCompletions:
    def test_answer_and_stream(self, server: Server) -> None:
        create = server.client.completions.create
        whole = create(model=MODEL, prompt="abc", max_tokens=6)
        assert whole.choices[0].text == "abca" and whole.object == "text_completion"
        text = "".join(chunk.choices[0].text for chunk in create(model=MODEL, prompt="abc", max_tokens=6, stream=True))
        assert text == "abca"
        assert create(model=MODEL, prompt="abc").usage.completion_tokens == 16  # pyright: ignore[reportOptionalMemberAccess]

    @pytest.mark.parametrize(
        ("prompt", "texts"),
        [
            (["ab", "cd"], ["ab", "cd"]),
            ([97, 98, 99], ["abc"]),
            ([[97, 98], [99]], ["aba", "ccc"]),
            ([""], [""]),
        ],
    )
    @pytest.mark.parametrize("n", [1, 2])
    def test_prompt_forms(self, server: Server, prompt: Any, texts: list[str], n: int) -> None:
        """Text prompts get a BOS, which shows as nothing."""
        expected = [text for text in texts for _ in range(n)]
        whole = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, n=n)
        assert [choice.index for choice in whole.choices] == list(range(len(expected)))
        assert [choice.text for choice in whole.choices] == expected
        streamed = dict.fromkeys(range(len(expected)), "")
        ends = []
        for chunk in server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, n=n, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
            ends += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
        assert list(streamed.values()) == expected and sorted(ends) == list(range(len(expected)))

    def test_scoring(self, server: Server) -> None:
        answer = server.client.completions.create(model=MODEL, prompt="héy", max_tokens=0, echo=True, logprobs=1)
        (choice,) = answer.choices
        assert choice.text == "héy" and choice.finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 0
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == [None, -1, -1, -1, -1]
        assert choice.logprobs.text_offset == [0, 0, 1, 1, 2]

    def test_echo_streamed_is_echo(self, server: Server) -> None:
        for prompt in ("ab", [97, 98]):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 0}
            whole = post(server, "completions", **body).json()["choices"][0]
            events = events_of(post(server, "completions", **body, stream=True).text)[:-1]
            assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]
            lists = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [item for entry in lists for item in entry[name]] == whole["logprobs"][name]

    def test_best_of(self, server: Server) -> None:
        answer = server.client.completions.create(model=MODEL, prompt="ab", max_tokens=2, n=2, best_of=4)
        assert len(answer.choices) == 2 and answer.usage is not None and answer.usage.completion_tokens == 8


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"n": 0}, "n"),
            ({"n": 129}, "n"),
            ({"n": 2, "best_of": 1}, "best_of"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"presence_penalty": 2.5}, "presence_penalty"),
            ({"logit_bias": {"999": 1}}, "logit_bias"),
            ({"logit_bias": {"a": 1}}, "logit_bias"),
            ({"logit_bias": {"1": 101}}, "logit_bias"),
            ({"stop": ["a", ""]}, "stop"),
            ({"stop": [1]}, "stop"),
            ({"stop_token_ids": [258]}, "stop_token_ids"),
            ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
            ({"priority": 2}, "priority"),
            ({"cache_salt": ""}, "cache_salt"),
            ({"response_format": {"type": "xml"}}, "response_format"),
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
            ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format"),
            ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
            ({"response_format": {"type": "ebnf", "ebnf": "start: a"}}, "response_format"),
            ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format"),
            ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
            ({"guided_json": "{"}, "guided_json"),
            ({"guided_choice": []}, "guided_choice"),
            ({"guided_grammar": ""}, "guided_grammar"),
            ({"guided_decoding": {"jsn": {}}}, "guided_decoding"),
            ({"guided_decoding": {"regex": "a", "json_object": True}}, "guided_decoding"),
            ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex"),
            ({"lora_request": {"name": "x"}}, "lora_request"),
            ({"thinking_token_budget": 5}, "thinking_token_budget"),
            ({"use_beam_search": True, "n": 9}, "n"),
            ({"use_beam_search": True, "n": 2, "presence_penalty": 1}, "presence_penalty"),
        ],
    )
    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    def test_fields_are_named(self, server: Server, path: str, fields: dict[str, Any], param: str) -> None:
        prompt: dict[str, Any] = {"prompt": "a"} if path == "completions" else {"messages": HI}
        error = refused(server, path, model=MODEL, **prompt, **fields)
        assert error["param"] == param and param in error["message"]
        assert error["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": [{"type": "function", "function": {"name": "two words"}}]},
            {"tool_choice": "required"},
            {"reasoning_effort": "some"},
            {"chat_template": "{{ 1 }}"},
            {"chat_template_kwargs": {"chat_template": "x"}},
            {"documents": [{}]},
            {"top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 21},
            {"max_completion_tokens": 0},
            {"modalities": ["audio"]},
        ],
    )
    def test_chat_fields(self, server: Server, fields: dict[str, Any]) -> None:
        assert refused(server, "chat/completions", messages=HI, **fields)["param"] == list(fields)[-1]

    @pytest.mark.parametrize(
        ("messages", "text"),
        [
            ([], "messages is empty"),
            ([{"role": "alien", "content": "x"}], "unknown role alien"),
            ([{"role": "user"}], "messages[0].content is required"),
            ([{"content": "x"}], "messages[0].role"),
            ([HI[0], {"role": "function", "content": "x"}], "messages[1]"),
            ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], "content[1]"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ("hi", "messages"),
            ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "tool_calls"),
        ],
    )
    def test_messages(self, server: Server, messages: Any, text: str) -> None:
        error = refused(server, "chat/completions", messages=messages)
        assert text in error["message"] and error["param"] == "messages"

    @pytest.mark.parametrize("prompt", [[], [[]], None, {}, [1, "a"], [[1], "a"], [1.5], 7, [True]])
    def test_prompts(self, server: Server, prompt: Any) -> None:
        assert refused(server, "completions", prompt=prompt)["param"] == "prompt"

    def test_ids(self, server: Server) -> None:
        assert "token id 258 is out" in refused(server, "completions", prompt=[1, 258])["message"]
        assert "token id -1 is out" in refused(server, "completions", prompt=[[1], [-1]])["message"]

    def test_context_overflow_reads_the_same_everywhere(self, server: Server) -> None:
        text = "x" * 4000
        chat = refused(server, "chat/completions", messages=[{"role": "user", "content": text}], max_tokens=1000)
        plain = refused(server, "completions", prompt=text, max_tokens=1000)
        assert chat["code"] == plain["code"] == "context_length_exceeded"
        assert chat["message"].replace("4020", "4001").replace("5020", "5001") == plain["message"]
        assert "4001" in plain["message"] and "1000" in plain["message"] and "4096" in plain["message"]

    def test_best_of_does_not_stream(self, server: Server) -> None:
        response = post(server, "completions", prompt="a", best_of=2, stream=True)
        assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"
        response = post(server, "completions", prompt="a", stream_options={"include_usage": True})
        assert response.status_code == 400 and response.json()["error"]["param"] == "stream_options"

    def test_unknown_models(self, server: Server) -> None:
        for name in ("fake", "fake:1:x", "FAKE:1", ""):
            with pytest.raises(openai.NotFoundError) as error:
                server.client.chat.completions.create(model=name, messages=HI)
            assert error.value.code == "model_not_found"
        assert refused(server, "completions", 404, model="other", prompt="a")["param"] == "model"

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}'])
    def test_bodies_that_are_none(self, server: Server, data: bytes) -> None:
        response = httpx.post(f"{server.url}/v1/completions", content=data)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"

    def test_unknown_paths(self, server: Server) -> None:
        assert httpx.get(f"{server.url}/nothing").json()["error"]["code"] == "not_found"
        assert httpx.get(f"{server.url}/v1/completions").status_code == 405

    def test_nothing_is_left_after_refusals(self, server: Server) -> None:
        assert server.service.router.num_running == 0 and not server.service.jobs
        assert server.client.completions.create(model=MODEL, prompt="ok", max_tokens=3).choices[0].text == "ok"


class TestSmallRoutes:
    def test_models(self, server: Server) -> None:
        assert [model.id for model in server.client.models.list()] == [MODEL]
        assert server.client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError):
            server.client.models.retrieve("other")

    def test_health_and_version(self, server: Server) -> None:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/health/ready").json() == {"status": "ready"}
        assert httpx.get(f"{server.url}/version").json() == {"version": "0"}


def test_unknown_fields_are_listed(server: Server) -> None:
    response = post(server, "completions", prompt="a", max_tokens=1, user="me", temprature=1, stream_options=None, **{
        "b\nad é": None})  # fmt: skip
    assert response.status_code == 200
    assert response.headers["x-headrace-warnings"] == "unknown fields: temprature, b\\nad \\xe9"
    assert response.headers["x-request-id"] == response.json()["id"]


def test_values_that_ask_for_nothing_are_taken(server: Server) -> None:
    response = post(server, "chat/completions", messages=HI, max_tokens=1, verbosity="medium", service_tier="auto")
    assert response.status_code == 200 and "x-headrace-warnings" not in response.headers
    assert refused(server, "chat/completions", messages=HI, verbosity="low")["param"] == "verbosity"


def test_null_is_absent(server: Server) -> None:
    names = ["max_tokens", "n", "temperature", "top_p", "seed", "stop", "logprobs", "logit_bias", "stream", "echo",
             "response_format", "model"]  # fmt: skip
    body = json.dumps({"prompt": "a", **dict.fromkeys(names)})
    response = httpx.post(f"{server.url}/v1/completions", content=body)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 16
