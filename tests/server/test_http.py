"""What a client may get wrong below JSON: the connection, the head, the body; over the fake runtime."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.server import protocol, reading
from headrace.server.prepare import Kitchen
from headrace.server.tenancy import Caller

from .harness import MODEL, Server, running

BODY = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()


def talk(server: Server, data: bytes, *, wait_s: float = 10.0) -> tuple[int, Any, bytes]:
    """(status, JSON body or None, everything), of the first response to raw bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while True:
            head, end, body = received.partition(b"\r\n\r\n")
            if end and len(body) >= int(header(head, b"content-length") or 0):
                break
            part = connection.recv(65536)
            if not part:
                break
            received += part
    if not received:
        return 0, None, b""
    kind = header(head, b"content-type")
    return int(head.split()[1]), json.loads(body) if kind == b"application/json" else None, received


def header(head: bytes, name: bytes) -> bytes:
    found = [line.split(b":", 1)[1].strip() for line in head.lower().split(b"\r\n") if line.startswith(name + b":")]
    return found[0] if found else b""


def request(*lines: str, body: bytes = BODY, method: str = "POST", path: str = "/v1/completions") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "host: x", *lines, f"content-length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        request(*(f"x-{number}: v" for number in range(20_000))),
    ],
)
def test_what_is_no_request_is_answered_in_json(server: Server, data: bytes) -> None:
    status, body, _ = talk(server, data)
    assert status == 400 and body["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_kinds_of_body(server: Server, kind: str) -> None:
    status, body, _ = talk(server, request(f"content-type: {kind}"))
    assert status == 415 and body["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "line", ["x: y", "content-type: application/json; charset=utf-8", "content-type: application/vnd.a+json"]
)
def test_kinds_of_body_that_are_json(server: Server, line: str) -> None:
    assert talk(server, request(line))[0] == 200


def test_an_encoded_body(server: Server) -> None:
    assert talk(server, request("content-encoding: gzip"))[0] == 415


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "post", "NONSENSE"])
def test_other_methods(server: Server, method: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, body, _ = talk(server, request(method=method, path=path, body=b""))
        assert status == 405 and body["error"]["code"] == "method_not_allowed"
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "path", ["/page", "//", "/v1", "/v1/completions/", "/V1/completions", "/%00", "*", "/" + "a" * 9000]
)
def test_other_paths(server: Server, path: str) -> None:
    status, body, _ = talk(server, request(path=path))
    assert status == 404 and body["error"]["code"] == "not_found"


def test_old_http_and_pipelines(server: Server) -> None:
    old = request(body=json.dumps({"prompt": "ab", "max_tokens": 2, "stream": True}).encode())
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(old.replace(b"HTTP/1.1", b"HTTP/1.0"))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.endswith(b"data: [DONE]\n\n") and b"transfer-encoding" not in received.lower()
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request() * 3 + request("connection: close", method="GET", path="/health", body=b""))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200") == 4


def test_bodies_that_are_too_large(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_BODY_BYTES", 1000)
    large = json.dumps({"prompt": "a" * 2000}).encode()
    announced = talk(server, request(body=large))
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    unannounced = talk(server, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(large), large))
    for status, body, _ in (announced, unannounced):
        assert status == 413 and body["error"]["code"] == "body_too_large"


def test_half_a_request_does_not_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reading, "PAUSE_TIMEOUT_S", 0.2)
    with running(folder) as server:
        started = time.monotonic()
        assert talk(server, b"POST /v1/comp")[0] == 0
        assert talk(server, b"")[0] == 0
        status, body, _ = talk(server, request()[:-5])
        assert status == 408 and body["error"]["code"] == "timeout"
        assert time.monotonic() - started < 5
        # a second request that stops in its head, on a connection that had an answer
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(request() + b"POST")
            assert b"200 OK" in b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_request_that_cannot_travel_fails_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer of more than 64 bits has no place in a message; nothing of the request may stay behind."""
    original = Kitchen.completion

    def too_large(kitchen: Kitchen, data: bytes, caller: Caller) -> Any:
        prepared = original(kitchen, data, caller)
        prepared.requests[0].prompt.append(2**70)
        return prepared

    with monkeypatch.context() as patch:
        patch.setattr(Kitchen, "completion", too_large)
        response = httpx.post(f"{server.url}/v1/completions", content=BODY)
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert not server.service.jobs and server.service.router.num_running == 0
    assert httpx.post(f"{server.url}/v1/completions", content=BODY).status_code == 200


def test_a_stuck_engine_is_not_ready(folder: Path) -> None:
    with running(folder, step_s=1.0, stall_timeout_s=0.2) as server:

        def ready() -> int:
            return httpx.get(f"{server.url}/health/ready").status_code

        time.sleep(0.3)
        assert ready() == 200, "an idle engine is not stuck"
        with httpx.stream("POST", f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "a", "stream": True}):
            time.sleep(0.4)
            assert ready() == 503 and httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 10**30}, "top_k"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"prompt_ignore_length": 2**63}, "prompt_ignore_length"),
        ({"no_repeat_ngram_size": 2**40}, "no_repeat_ngram_size"),
        ({"use_beam_search": True, "length_penalty": 1e11}, "length_penalty"),
        ({"temperature": 1e300}, "temperature"),
        ({"logit_bias": {"1" + "0" * 5000: 1}}, "logit_bias"),
        ({"stop": ["a"] * 300}, "stop"),
        ({"stop": "a" * 5000}, "stop"),
        ({"stop_token_ids": [1] * 300}, "stop_token_ids"),
        ({"bad": ["a"] * 2000}, "bad"),
        ({"prompt_logprobs": 200}, "prompt_logprobs"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ],
)
def test_numbers_and_lists_that_are_too_large(server: Server, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert len(response.json()["error"]["message"]) < 300
