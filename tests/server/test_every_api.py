"""What holds on every API that generates, each in its own form: refusals before the first byte, one end, one name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.front.fake import FakeLoop, fake_info

from .harness import MODEL, Server, running

HI = [{"role": "user", "content": "hi"}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 400},
}
CHATS = [path for path in APIS if path != "/v1/completions"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), loop=FakeLoop(fake_info())) as server:
        yield server


def refused(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=20)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": 2}, {"top_k": "five"}, {"stop_token_ids": [99999]}])
def test_bad_values_are_plain_errors_of_streams_too(server: Server, path: str, fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refused(server, path, **APIS[path], **fields, stream=True)
    assert name in error["message"] and error.get("param", name) == name


@pytest.mark.parametrize("path", [*CHATS, "/v1/messages/count_tokens", "/tokenize", "/render"])
@pytest.mark.parametrize("fields", [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "x"}}])
def test_no_client_brings_a_template(server: Server, path: str, fields: dict[str, Any]) -> None:
    assert "chat_template" in str(refused(server, path, **APIS.get(path, {"messages": HI}), **fields))


def test_context_overflow_has_its_numbers_everywhere(server: Server) -> None:
    text = "x" * 4000
    said = [{"role": "user", "content": text}]
    chat = refused(server, "/v1/chat/completions", messages=said, max_tokens=1000)
    response = refused(server, "/v1/responses", input=text, max_output_tokens=1000)
    message = refused(server, "/v1/messages", messages=said, max_tokens=1000)
    assert chat["code"] == response["code"] == "context_length_exceeded"
    assert chat["message"] == response["message"] and chat["message"] in message["message"]
    assert all(number in chat["message"] for number in ("4020", "1000", "4096"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": 7, "format": "no-such"}}}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "/v1/completions": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_constraint_that_can_not_be_kept_is_an_error(server: Server, path: str, stream: bool) -> None:
    """Never text without it: nothing reaches the engine."""
    accepted = server.service.counters.accepted
    error = refused(server, path, **APIS[path], **CONSTRAINTS[path], stream=stream)
    assert "/properties/a" in error["message"]
    fields = {"response_format", "text.format", "output_config"}
    assert error.get("param", "response_format") in fields
    assert server.service.counters.accepted == accepted


@pytest.mark.parametrize("path", APIS)
def test_a_stream_that_fails_ends_once_and_is_logged_by_both_names(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = FakeLoop(fake_info())
    lines: list[str] = []
    with (
        running(tmp_path, loop=loop, step_s=0.005) as server,
        httpx.stream(
            "POST",
            server.url + path,
            json={"model": MODEL, **APIS[path], "stream": True},
            headers={"x-request-id": "mine-1"},
            timeout=20,
        ) as answer,
    ):
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 12:
                loop.fault = "the row has failed"
    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(data) for data in datas if data != "[DONE]"]
    told = [event for event in events if "the row has failed" in json.dumps(event)]
    assert told == events[-1:]
    assert datas.count("[DONE]") == (path in ("/v1/chat/completions", "/v1/completions"))
    assert any("mine-1" in record.getMessage() and "failed" in record.getMessage() for record in caplog.records)


def test_an_unknown_field_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many requests have it, on whichever API; each reply lists it."""
    with running(tmp_path) as server:
        for path in [*APIS, *APIS]:
            body = {"model": MODEL, **APIS[path], "colour": "red", "user": "u", "metadata": {"a": "b"}}
            answer = httpx.post(server.url + path, json=body, timeout=20)
            assert answer.status_code == 200 and answer.headers["x-headrace-warnings"] == "unknown fields: colour"
    lines = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert len(lines) == 1 and "'colour'" in lines[0]
