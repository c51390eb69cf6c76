"""Bodies made to hurt: too many values, texts far beyond the context, many large ones at once; and clients that take
nothing, or send almost nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.front.fake import FakeLoop, fake_info
from headrace.server import protocol, reading
from headrace.server.bodies import ChatBody, CompletionBody, parse_body
from headrace.server.body_limits import MAX_STRINGS, SMALL_BYTES
from headrace.server.errors import Unavailable
from headrace.server.reading import SMALL_BODY_BYTES, BodyRoom
from headrace.server.response_body import ResponseBody

from .harness import Server, running
from .test_http import request
from .test_service import until

FAR_TOO_LONG = "word " * 200_000


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=20)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": FAR_TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", FAR_TOO_LONG]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}, "messages"),
        ("/v1/responses", {"input": FAR_TOO_LONG}, "input"),
        ("/v1/embeddings", {"input": FAR_TOO_LONG}, "input"),
    ],
)
def test_a_text_far_beyond_the_context_is_not_tokenised(server: Server, path: str, body: Any, param: str) -> None:
    tokenizer: Any = server.service.kitchen().tokenizer
    encode, lengths = type(tokenizer).encode, list[int]()

    def counted(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(tokenizer, text, **options)

    tokenizer.encode = counted
    try:
        response = post(server, path, **body)
    finally:
        del tokenizer.encode
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == param
    assert "4096 tokens; the prompt has more than 4096" in error["message"]
    assert max(lengths) < len(FAR_TOO_LONG) / 4


def test_a_text_that_is_cut_to_its_end_may_be_of_any_length(server: Server) -> None:
    body = {"prompt": FAR_TOO_LONG + "the end", "max_tokens": 7, "truncate_prompt_tokens": 7, "echo": True}
    choice = post(server, "/v1/completions", **body).json()["choices"][0]
    assert choice["text"].startswith("the end")


def test_counting_has_a_limit_of_its_own(server: Server) -> None:
    assert post(server, "/tokenize", prompt="a" * 20_000).json()["count"] == 20_001
    response = post(server, "/tokenize", prompt=FAR_TOO_LONG * 2)
    assert response.status_code == 400 and "more than 262144" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [' + b'"a",' * (MAX_STRINGS + 1) + b'"a"]}',
        b'{"input": [' + b"[]," * 400_000 + b"[]]}",
        b'{"messages": [' + b"{}," * 400_000 + b"{}]}",
        b'{"x": ' + b"[" * 2_000_000,
        b'{"prompt": [' + b"1," * ((1 << 22) + 1) + b"1]}",
    ],
)
def test_too_many_values(server: Server, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/responses", "/tokenize"):
        response = httpx.post(server.url + path, content=data, timeout=20)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large", response.text


def test_text_may_have_what_lists_may_not() -> None:
    """JSON within JSON: its quotes are escaped, and nobody's limit."""
    text = json.dumps({"a": ["b", "c"]}) * 50_000
    data = json.dumps({"prompt": text}).encode()
    assert len(data) > SMALL_BYTES and parse_body(data, CompletionBody)[0].prompt == text


@pytest.mark.parametrize(
    ("cls", "data"),
    [
        (ResponseBody, {"input": ["a"] * 1000}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [None] * 1000}),
        (ChatBody, {"messages": [1] * 1000}),
    ],
)
def test_a_list_stops_at_its_first_mistake(cls: Any, data: Any) -> None:
    """Each mistake would cost a kilobyte, and one is told."""
    import pydantic

    with pytest.raises(pydantic.ValidationError) as found:
        cls.model_validate(data)
    assert found.value.error_count() < 4


def test_large_bodies_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROOM_TIMEOUT_S", 0.2)
    size = SMALL_BODY_BYTES + 1

    async def run() -> None:
        room, order = BodyRoom(2 * size), list[str]()

        async def one(name: str, hold_s: float) -> None:
            async with room.take(size):
                order.append(name)
                await asyncio.sleep(hold_s)

        await asyncio.gather(one("a", 0.05), one("b", 0.05), one("c", 0.05), one("d", 0.0))
        assert order == ["a", "b", "c", "d"]
        async with room.take(2 * size):
            with pytest.raises(Unavailable, match="too many large bodies"):
                await one("e", 0)
        await one("f", 0)  # what was given up has left nothing

    asyncio.run(run())


def connect(server: Server, *, receive_bytes: int = 0) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.socket()
    if receive_bytes:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    found.settimeout(20)
    found.connect((host, int(port)))
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(protocol, "TAKE_TIMEOUT_S", 0.3)
    info = fake_info(max_seq_len=8192, kv_num_blocks=1024)
    with running(folder, loop=FakeLoop(info)) as server:
        body = {"prompt": "ab", "max_tokens": 5000, "stream": stream, "logprobs": 5, "return_token_ids": True}
        with connect(server, receive_bytes=4096) as silent:
            silent.sendall(request(body=json.dumps(body).encode()))
            begin_s = time.monotonic()
            assert until(lambda: server.service.counters.accepted == 1)
            assert until(lambda: server.call(lambda: num_connections()) == 0, 15), "it is still held"
            assert time.monotonic() - begin_s >= 0.3
            assert until(lambda: not server.service.jobs)
        assert httpx.get(f"{server.url}/health").status_code == 200


def num_connections() -> int:
    """Tasks of requests that are being answered, on the running loop."""
    return sum("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())


def test_a_slow_reader_is_not_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes a little now and then gets everything."""
    monkeypatch.setattr(protocol, "TAKE_TIMEOUT_S", 0.4)
    with running(folder, loop=FakeLoop(fake_info(max_seq_len=8192, kv_num_blocks=1024))) as server:
        body = {"prompt": "ab", "max_tokens": 3000, "stream": True, "logprobs": 5}
        with connect(server, receive_bytes=4096) as slow:
            slow.sendall(request("connection: close", body=json.dumps(body).encode()))
            received, begin_s = b"", time.monotonic()
            while time.monotonic() - begin_s < 2:
                received += slow.recv(20_000)
                time.sleep(0.1)
            while part := slow.recv(1 << 20):
                received += part
    assert received.count(b"data: ") > 1000 and b"data: [DONE]" in received


def test_a_body_in_drops_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the whole never."""
    monkeypatch.setattr(reading, "PAUSE_TIMEOUT_S", 0.3)
    with running(folder) as server, connect(server) as client:
        client.sendall(request(body=b"x" * 2000)[:-2000])
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    client.sendall(b" ")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert client.recv(65536).startswith(b"HTTP/1.1 408")
        finally:
            stop.set()
            thread.join()
