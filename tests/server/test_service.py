"""What happens to requests when clients leave, the queue is full, or the runtime is not there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import wire
from headrace.front.fake import FakeLoop, fake_info
from headrace.front.text_side import TextSide

from .harness import MODEL, Server, events_of, running, text_side


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def is_empty(server: Server, loop: FakeLoop) -> bool:
    return not (loop.running or loop.waiting or server.service.jobs or server.service.router.num_running)


def send_and_leave(server: Server, body: str, *, after: Callable[[], bool]) -> None:
    """A raw client that closes its socket once `after` holds."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert until(after)


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("more", ['"n": 1', '"n": 3', '"n": 2, "use_beam_search": false'])
def test_a_client_that_leaves_frees_everything(folder: Path, stream: str, more: str) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, step_s=0.005) as server:
        body = f'{{"prompt": ["abc", "de"], "max_tokens": 3000, "stream": {stream}, {more}}}'
        send_and_leave(server, body, after=lambda: len(loop.running) >= 2)
        assert until(lambda: is_empty(server, loop), 3.0)
        assert {reason for _, reason in loop.aborted} == {"abort"}
        assert server.service.counters.disconnected == 1
        assert server.client.completions.create(model=MODEL, prompt="ok", max_tokens=3).choices[0].text == "ok"


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_queued_request_leaves_too(folder: Path, stream: str) -> None:
    loop = FakeLoop(fake_info(max_batch_size=1))
    with running(folder, loop=loop, step_s=0.005) as server:
        first = threading.Thread(
            target=lambda: httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 200}, timeout=20
            )
        )
        first.start()
        assert until(lambda: len(loop.running) == 1)
        body = f'{{"prompt": "abc", "max_tokens": 3000, "stream": {stream}, "n": 2}}'
        send_and_leave(server, body, after=lambda: len(loop.waiting) == 2)
        assert until(lambda: not loop.waiting)
        first.join(20)
        assert is_empty(server, loop)


def test_stop_strings_free_the_runtime_and_are_no_aborts(folder: Path) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, step_s=0.002) as server:
        answer = server.client.completions.create(model=MODEL, prompt="abcd", max_tokens=3000, stop="d", n=2)
        assert [choice.text for choice in answer.choices] == ["abc", "abc"]
        assert until(lambda: is_empty(server, loop))
        assert [reason for _, reason in loop.aborted] == ["stop", "stop"]


class TestLoading:
    def test_requests_get_503_until_the_model_is_there(self, folder: Path) -> None:
        ready = threading.Event()
        with running(folder, ready_after=ready, wait=False) as server:
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.get(f"{server.url}/health/ready").status_code == 503
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["code"] == "model_loading"
            ready.set()
            assert until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200)
            assert server.client.completions.create(model=MODEL, prompt="ok", max_tokens=3).choices[0].text == "ok"

    def test_a_tokenizer_that_fails_ends_the_start(self, folder: Path) -> None:
        def fails() -> TextSide:
            raise ValueError("tokenizer.json is damaged: fetch it again")

        with running(folder, ready_after=threading.Event(), load_text=fails, wait=False) as server:
            assert until(lambda: server.service.failure is not None)
            failure = server.service.failure
            assert failure is not None and failure.bad_input and "tokenizer.json is damaged" in failure.message
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"

    def test_a_model_without_a_template(self, folder: Path) -> None:
        with running(folder, load_text=lambda: text_side(folder, has_template=False)) as server:
            body = {"messages": [{"role": "user", "content": "a"}]}
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]

    def test_ids_in_and_ids_out_without_a_tokenizer(self, folder: Path) -> None:
        def load() -> TextSide:
            whole = text_side(folder)
            return TextSide(source=whole.source, tokenizer=None, template=None)

        with running(folder, load_text=load) as server:

            def post(**body: Any) -> httpx.Response:
                return httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 3, **body})

            choice = post(prompt=[5, 6]).json()["choices"][0]
            assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 5])
            events = events_of(post(prompt=[5, 6], stream=True).text)
            assert [i for event in events[:-1] for i in event["choices"][0].get("token_ids", [])] == [5, 6, 5]
            refusals: list[tuple[dict[str, Any], str]] = [
                ({"prompt": "a"}, "prompt"),
                ({"prompt": [1], "stop": "a"}, "stop"),
                ({"prompt": [1], "logprobs": 1}, "logprobs"),
                ({"prompt": [1], "echo": True}, "echo"),
            ]
            for body, param in refusals:
                response = post(**body)
                assert response.status_code == 400 and response.json()["error"]["param"] == param


class TestFaults:
    def stream_lines(self, server: Server, **body: Any) -> list[Any]:
        response = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "abc", "stream": True, **body}, timeout=20
        )
        assert response.status_code == 200
        return events_of(response.text)

    def fault_after_start(self, loop: FakeLoop, cause: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            assert until(lambda: any(entry.num_tokens > 2 for entry in list(loop.running.values())))
            cause()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def test_a_request_that_fails_while_streaming(self, folder: Path) -> None:
        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, step_s=0.005) as server:
            thread = self.fault_after_start(loop, lambda: setattr(loop, "fault", "broken kernel"))
            events = self.stream_lines(server, max_tokens=3000, n=2)
            thread.join()
            assert events[-1] == "[DONE]" and events[-2]["error"]["message"] == "broken kernel"
            assert all(not event["choices"][0]["finish_reason"] for event in events[:-2])
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "stream": True})
            assert response.status_code == 500 and response.json()["error"]["message"] == "broken kernel"
            loop.fault = ""
            assert is_empty(server, loop)
            assert self.stream_lines(server, max_tokens=2)[-1] == "[DONE]"

    def test_a_runtime_that_fails(self, folder: Path) -> None:
        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, step_s=0.005) as server:
            thread = self.fault_after_start(loop, lambda: server.runtime.fail(wire.Failed("out of memory")))
            events = self.stream_lines(server, max_tokens=3000)
            thread.join()
            assert events[-1] == "[DONE]" and "out of memory" in events[-2]["error"]["message"]
            assert httpx.get(f"{server.url}/health/ready").json() == {"status": "failed"}
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"}).status_code == 503

    def test_a_fault_of_the_writer_is_one_requests(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.server.completion_route import CompletionRoute

        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, step_s=0.002) as server:
            with monkeypatch.context() as patched:
                patched.setattr(CompletionRoute, "end", lambda *_: 1 / 0)
                events = self.stream_lines(server, max_tokens=5)
                assert events[-1] == "[DONE]" and events[-2]["error"]["message"] == "internal error"
            assert until(lambda: is_empty(server, loop))
            assert self.stream_lines(server, max_tokens=2)[-1] == "[DONE]"

    def test_a_fault_while_preparing_is_one_requests(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.server.prepare import Kitchen

        with running(folder) as server:
            with monkeypatch.context() as patched:
                patched.setattr(Kitchen, "_answer", lambda *_, **__: 1 / 0)
                response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"})
                assert response.status_code == 500
                assert response.json()["error"]["message"] == "internal error: ZeroDivisionError"
            assert server.client.completions.create(model=MODEL, prompt="ok", max_tokens=3).choices[0].text == "ok"


def test_draining(folder: Path) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, step_s=0.005) as server:
        done: list[httpx.Response] = []
        body = {"prompt": "abc", "max_tokens": 60, "stream": True}
        thread = threading.Thread(
            target=lambda: done.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=20))
        )
        thread.start()
        assert until(lambda: bool(loop.running))
        server.call(server.service.drain)
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        thread.join(20)
        events = events_of(done[0].text)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


def test_what_is_cut_off_ends_with_an_error(folder: Path) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, step_s=0.005) as server:
        done: list[httpx.Response] = []

        def post(stream: bool) -> None:
            body = {"prompt": "abc", "max_tokens": 3000, "stream": stream}
            done.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=20))

        threads = [threading.Thread(target=post, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        assert until(lambda: len(loop.running) == 2 and all(e.num_tokens > 3 for e in list(loop.running.values())))
        server.call(lambda: server.service.end_all("the server is shutting down", code="shutting_down", status=503))
        for thread in threads:
            thread.join(20)
        whole, streamed = sorted(done, key=lambda response: response.status_code != 503)
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "shutting_down"
        events = events_of(streamed.text)
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutting_down"
        assert until(lambda: is_empty(server, loop))


def test_a_full_queue_answers_429(folder: Path) -> None:
    loop = FakeLoop(fake_info(max_batch_size=1))
    with running(folder, loop=loop, step_s=0.005, max_queued_requests=2, max_queued_tokens=50) as server:

        def post(**body: Any) -> httpx.Response:
            return httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 60, **body}, timeout=20
            )

        busy = threading.Thread(target=post)
        busy.start()
        assert until(lambda: len(loop.running) == 1 and server.service.router.num_waiting == 0)
        for body in ({"n": 3}, {"prompt": ["a", "b", "c"]}, {"prompt": "x" * 60}, {"n": 3, "stream": True}):
            response = post(**body)
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
        assert post(n=2).status_code == 200
        busy.join(20)


def test_api_keys(folder: Path) -> None:
    with running(folder, api_keys=("one", "two")) as server:
        from starlette.routing import Route

        from headrace.server.app import make_app

        paths = [route.path for route in make_app(server.service, version="0").routes if isinstance(route, Route)]
        assert "/v1/chat/completions" in paths and "/version" in paths
        with httpx.Client(base_url=server.url, timeout=20) as client:
            for path in paths:
                url = path.replace("{name:path}", "x")
                is_open = path in ("/", "/health", "/health/ready")
                assert (client.get(url).status_code == 401) is not is_open, path
                assert (client.get(url, headers={"authorization": "Bearer on"}).status_code == 401) is not is_open
                assert client.get(url, headers={"authorization": "bearer two"}).status_code != 401
            assert client.get("/nothing").status_code == 401


def test_stream_interval_gathers_tokens(folder: Path) -> None:
    with running(folder, loop=FakeLoop(fake_info()), step_s=0.002, stream_interval=4) as server:
        chunks = list(server.client.completions.create(model=MODEL, prompt=[97] * 3, max_tokens=10, stream=True))
        texts = [chunk.choices[0].text for chunk in chunks]
        assert "".join(texts) == "a" * 10 and [len(text) for text in texts] == [1, 4, 4, 1, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
def test_the_event_loop_is_free_while_a_worker_tokenises(folder: Path, path: str, body: dict[str, Any]) -> None:
    """The health check answers while workers are held up."""
    gate, entered = threading.Event(), threading.Event()
    with running(folder) as server:
        tokenizer: Any = server.service.kitchen().tokenizer

        def slowed(work: Callable[..., Any]) -> Callable[..., Any]:
            def slow(*words: Any, **options: Any) -> Any:
                entered.set()
                assert gate.wait(10)
                return work(*words, **options)

            return slow

        tokenizer.encode, tokenizer.decode = slowed(tokenizer.encode), slowed(tokenizer.decode)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{server.url}{path}", json=body, timeout=20)
            assert entered.wait(10)
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
            gate.set()
            assert answer.result(10).status_code == 200
