"""What operators read and do: health, metrics, statistics, timings, ids, limits, and what lies around the routes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace import wire
from headrace.front.fake import FakeLoop, fake_info
from headrace.server.service import Operations

from .harness import MODEL, Server, events_of, running
from .series import Series, series_of, value
from .test_service import is_empty, send_and_leave, until


def scrape(server: Server, path: str = "/metrics") -> Series:
    response = httpx.get(server.url + path)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    samples = [line for line in response.text.splitlines() if not line.startswith("#")]
    assert all(f'model_name="{MODEL}"' in sample for sample in samples)
    return series_of(response.text)


def post(
    server: Server, *, path: str = "completions", headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": 4, **body}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=20, headers=headers)


class TestMetrics:
    def test_series_exist_before_the_first_request(self, folder: Path) -> None:
        with running(folder) as server:
            series = scrape(server)
            for reason in ("stop", "length", "abort", "timeout", "error"):
                assert value(series, "requests_total", finish_reason=reason) == 0
            assert value(series, "request_error_total", http_code="429") == 0
            assert value(series, "time_to_first_token_seconds_count") == 0
            assert value(series, "engine_ready") == 1
            assert value(series, "prefill_batch_tokens_bucket", le="+Inf") == 6
            assert value(series, "prefill_batch_tokens_sum") == 1000
            assert scrape(server, "/prometheus/metrics").keys() == series.keys()

    def test_counts_add_up(self, folder: Path) -> None:
        """Ends of every kind, choices and prompts counted one by one; the meter has nothing left."""
        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, step_s=0.002) as server:
            assert post(server, n=2, prompt=["ab", "cd"]).status_code == 200  # 4 by length
            assert post(server, stop="c", max_tokens=50, stream=True).status_code == 200  # a stop string
            assert post(server, use_beam_search=True, best_of=2, n=2).status_code == 200  # 2 by length
            assert post(server, max_tokens=0, echo=True).status_code == 200  # no token
            assert post(server, max_tokens=30, timeout=0.2).status_code == 200  # by the fake, in time
            assert post(server, n=0).status_code == 400
            long = '{"prompt": "abc", "max_tokens": 3000, "stream": true, "n": 3}'
            first_tokens = "time_to_first_token_seconds_count"
            send_and_leave(server, long, after=lambda: value(scrape(server), first_tokens) == 8 + 3)
            assert until(lambda: is_empty(server, loop))
            loop.fault = "broken kernel"
            assert post(server, n=2).status_code == 500
            loop.fault = ""
            series = scrape(server)
            counted = {
                dict(labels)["finish_reason"]: number
                for (name, labels), number in series.items()
                if name == "trtllm_requests_total"
            }
            assert counted == {"stop": 1, "length": 8, "abort": 3, "error": 2, "timeout": 0}
            assert sum(counted.values()) == value(series, "requests_accepted_total") == 14
            assert value(series, "request_abort_total", reason="disconnected") == 3
            assert value(series, "request_error_total", http_code="400") == 1
            assert value(series, "request_error_total", http_code="500") == 1
            # Without a token: max_tokens=0 and the two that failed at once.
            assert value(series, first_tokens) == 14 - 3
            assert value(series, "e2e_request_latency_seconds_count") == 14
            # The tokenizer begins each prompt with a token of its own.
            assert value(series, "prompt_tokens_total") == 3 * 2 + 4 * 6
            assert server.service.meter.num_open == 0

    def test_a_stuck_engine_does_not_hide_the_server(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.server import operation_routes

        monkeypatch.setattr(operation_routes, "SCRAPE_TIMEOUT_S", 0.1)
        ready = threading.Event()
        with running(folder, ready_after=ready, wait=False) as server:
            assert httpx.get(f"{server.url}/health/ready").status_code == 503
            assert httpx.get(f"{server.url}/nowhere").status_code == 404
            series = scrape(server)
            assert value(series, "engine_ready") == 0
            assert value(series, "request_error_total", http_code="503") == 0, "a probe is no request that failed"
            assert value(series, "request_error_total", http_code="404") == 1
            ready.set()
            assert until(lambda: server.service.state == "ready")
            assert value(scrape(server), "steps_total") == 0
            server.call(lambda: server.service.fail(wire.Failed("gone")))
            assert value(scrape(server), "engine_ready") == 0

    def test_own_buckets(self, folder: Path) -> None:
        buckets = {"time_to_first_token_buckets": [0.5, 2.0], "request_queue_time_buckets": None}
        with running(folder, operations=Operations(buckets=buckets)) as server:
            found = [labels for name, labels in scrape(server) if name == "trtllm_time_to_first_token_seconds_bucket"]
            bounds = {dict(labels)["le"] for labels in found}
            assert bounds == {"0.5", "2.0", "+Inf"}

    def test_a_stall_is_counted_once(self, folder: Path) -> None:
        class Stuck(FakeLoop):
            def step(self) -> dict[int, wire.Outputs]:
                return {}

        loop = Stuck(fake_info())
        with running(folder, loop=loop, step_s=0.01, stall_timeout_s=0.3) as server:
            thread = threading.Thread(target=lambda: post(server))
            thread.start()
            assert until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503, 3.0)
            assert until(lambda: value(scrape(server), "engine_stalls_total") == 1, 3.0)
            assert value(scrape(server), "engine_stalled") == 1
            assert httpx.get(f"{server.url}/health").status_code == 200
            server.call(lambda: server.service.end_all("enough", code="shutting_down", status=503))
            thread.join(10)
            assert value(scrape(server), "request_abort_total", reason="shutting_down") == 1


class TestStatistics:
    def test_stats_and_server_info(self, server: Server) -> None:
        found = httpx.get(f"{server.url}/stats").json()
        assert found["server"]["state"] == "ready" and "numActiveRequests" in found
        assert isinstance(httpx.get(f"{server.url}/iteration_stats").json(), list)
        info = httpx.get(f"{server.url}/server_info").json()
        assert info["served_model_name"] == MODEL and info["kv_cache"]["tokens_per_block"] == 32

    def test_statistics_that_are_not_kept(self, folder: Path) -> None:
        startup = wire.Startup(settings={"enable_iter_perf_stats": False})
        loop = FakeLoop(msgspec.structs.replace(fake_info(), startup=startup))
        with running(folder, loop=loop) as server:
            response = httpx.get(f"{server.url}/iteration_stats")
            assert response.status_code == 400 and "enable_iter_perf_stats" in response.json()["error"]["message"]

    def test_profiles_only_where_the_operator_wants_them(self, server: Server, folder: Path) -> None:
        refused = httpx.post(f"{server.url}/start_profile", json={})
        assert refused.status_code == 400 and "--profile_dir" in refused.json()["error"]["message"]
        with running(folder, operations=Operations(can_profile=True)) as other:
            assert httpx.post(f"{other.url}/start_profile", json={"num_steps": 3}).json()["message"] == "tracing"
            assert httpx.post(f"{other.url}/stop_profile").json()["files"] == ["trace-0.json"]
            chosen = httpx.post(f"{other.url}/start_profile", json={"output_dir": "/etc"})
            assert chosen.status_code == 400 and chosen.json()["error"]["param"] == "output_dir"


class TestHealth:
    def test_a_token_is_made(self, folder: Path) -> None:
        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, max_queued_requests=0) as server:
            assert post(server).status_code == 429
            response = httpx.get(f"{server.url}/health_generate")
            assert response.status_code == 200 and response.text == "OK"
            assert is_empty(server, loop)

    def test_no_token_in_time(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.server import operation_routes

        class Stuck(FakeLoop):
            def step(self) -> dict[int, wire.Outputs]:
                return {}

        monkeypatch.setattr(operation_routes, "PROBE_TIMEOUT_S", 0.2)
        loop = Stuck(fake_info())
        with running(folder, loop=loop, step_s=0.01) as server:
            response = httpx.get(f"{server.url}/health_generate")
            assert response.status_code == 503 and "no token" in response.json()["error"]["message"]
            assert until(lambda: not (loop.waiting or server.service.jobs))

    def test_while_loading(self, folder: Path) -> None:
        with running(folder, ready_after=threading.Event(), wait=False) as server:
            assert httpx.get(f"{server.url}/health_generate").status_code == 503


class TestTimingAndIds:
    def test_timing_where_it_is_asked_for(self, server: Server) -> None:
        plain = post(server)
        assert "timing" not in plain.json()["usage"]
        spans = dict(part.split(";dur=") for part in plain.headers["server-timing"].split(", "))
        assert spans.keys() == {"queue", "prefill", "decode"} and all(float(span) >= 0 for span in spans.values())
        timing = post(server, return_timing=True).json()["usage"]["timing"]
        assert timing.keys() == {"queue_ms", "prefill_ms", "decode_ms"}
        last = events_of(post(server, return_timing=True, stream=True).text)[-2]
        assert last["usage"]["timing"].keys() == timing.keys() and last["choices"] == []

    @pytest.mark.parametrize("stream", [True, False])
    def test_one_id_everywhere(self, server: Server, stream: bool) -> None:
        own = post(server, stream=stream)
        body = events_of(own.text)[0] if stream else own.json()
        assert own.headers["x-request-id"] == body["id"] and body["id"].startswith("cmpl-")
        given = post(server, stream=stream, headers={"X-Request-Id": "trace-7:a/b"})
        body = events_of(given.text)[0] if stream else given.json()
        assert given.headers["x-request-id"] == body["id"] == "trace-7:a/b"

    @pytest.mark.parametrize("name", ["a b", "x" * 200, "é", "<script>", ""])
    def test_ids_that_can_not_be_repeated(self, server: Server, name: str) -> None:
        response = post(server, headers={"X-Request-Id": name.encode()})  # pyright: ignore[reportArgumentType]
        assert response.headers["x-request-id"] == response.json()["id"] != name

    def test_refusals_have_one_too(self, server: Server) -> None:
        assert post(server, n=0, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
        assert httpx.get(f"{server.url}/nothing").headers["x-request-id"].startswith("req-")

    def test_timeout_is_checked(self, server: Server) -> None:
        response = post(server, timeout=0)
        assert response.status_code == 400 and response.json()["error"]["param"] == "timeout"

    def test_the_shorter_timeout_holds(self, folder: Path) -> None:
        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, step_s=0.05, request_timeout_s=9.0) as server:
            seen: list[float | None] = []
            for timeout in (None, 5.0, 50.0):
                thread = threading.Thread(target=lambda t=timeout: post(server, max_tokens=6, timeout=t))
                thread.start()
                assert until(lambda: bool(loop.running))
                seen += [entry.request.timeout_s for entry in list(loop.running.values())]
                thread.join(10)
            assert seen == [9.0, 5.0, 9.0]


class TestAround:
    def test_keys_of_both_kinds_and_open_metrics(self, folder: Path) -> None:
        with running(folder, api_keys=("one", "two"), operations=Operations(metrics_open=True)) as server:
            assert httpx.get(f"{server.url}/v1/models").status_code == 401
            assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "two"}).status_code == 200
            assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "tw"}).status_code == 401
            assert httpx.get(f"{server.url}/metrics").status_code == 200
            assert httpx.get(f"{server.url}/stats").status_code == 401
        with running(folder, api_keys=("one",)) as server:
            assert httpx.get(f"{server.url}/metrics").status_code == 401
            assert httpx.get(f"{server.url}/prometheus/metrics").status_code == 401

    def test_unknown_fields_may_be_errors(self, folder: Path) -> None:
        with running(folder, operations=Operations(strict_fields=True)) as server:
            response = post(server, temperatur=0.1)
            assert response.status_code == 400 and response.json()["error"]["param"] == "temperatur"
            assert post(server, user="me").status_code == 200

    def test_other_sites_pages(self, folder: Path) -> None:
        origin = "https://page.example"
        operations = Operations(cors_origins=(origin,))
        with running(folder, api_keys=("one",), operations=operations) as server:
            asked = {"origin": origin, "access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "authorization,content-type"
            allowed = httpx.options(f"{server.url}/v1/completions", headers=asked)
            assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin
            other = httpx.options(f"{server.url}/v1/completions", headers={**asked, "origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers
        with running(folder) as server:
            assert "access-control-allow-origin" not in post(server, headers={"origin": origin}).headers

    def test_middleware(self, folder: Path) -> None:
        with running(folder, operations=Operations(middleware=(Marking,))) as server:
            assert httpx.get(f"{server.url}/health").headers["x-marked"] == "yes"

    def test_a_queue_that_is_full_says_when_to_come_back(self, folder: Path) -> None:
        loop = FakeLoop(fake_info(max_batch_size=1))
        with running(folder, loop=loop, step_s=0.02, max_queued_requests=12) as server:
            threads = [threading.Thread(target=lambda: post(server, max_tokens=10)) for _ in range(11)]
            for thread in threads:
                thread.start()
            assert until(lambda: server.service.router.num_waiting <= 8 and len(loop.waiting) > 5)
            response = post(server, n=8)
            # 0.2 s each, half of those that wait: about a second.
            assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 4
            for thread in threads:
                thread.join(20)

    def test_several_processes_share_the_queue(self, folder: Path) -> None:
        with running(folder, max_queued_requests=4, operations=Operations(num_fronts=2)) as server:
            assert post(server, n=3).status_code == 429
            assert post(server, n=2).status_code == 200


class Marking:
    """ASGI middleware of an operator."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"yes")]
            await send(message)

        await self._app(scope, receive, marked)


def test_a_thousand_cancels_leave_nothing(folder: Path) -> None:
    """Clients that leave at any moment: before the body, in the queue, in the prompt, in the stream, at the end."""
    import asyncio
    import random

    loop = FakeLoop(fake_info(max_batch_size=16))
    chance = random.Random(5)

    async def one(host: str, port: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            reader, writer = await asyncio.open_connection(host, port)
            stream, n = chance.choice(["true", "false"]), chance.randint(1, 3)
            body = f'{{"prompt": "abc", "max_tokens": {chance.randint(1, 60)}, "stream": {stream}, "n": {n}}}'
            data = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            writer.write(data[: chance.randint(1, len(data))] if chance.random() < 0.1 else data)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(chance.randint(1, 4000)), chance.random() * 0.05)
            writer.close()

    async def run(host: str, port: int) -> None:
        gate = asyncio.Semaphore(48)
        await asyncio.gather(*(one(host, port, gate) for _ in range(1000)))

    with running(folder, loop=loop, step_s=0.0005) as server:
        host, port = server.url.removeprefix("http://").split(":")
        asyncio.run(run(host, int(port)))

        def is_over() -> bool:
            """Also for requests that were still being prepared when their clients left."""
            series = scrape(server)
            ended = sum(number for (name, _), number in series.items() if name == "trtllm_requests_total")
            return is_empty(server, loop) and ended == value(series, "requests_accepted_total") > 500

        assert until(is_over, 20)
        assert server.service.meter.num_open == 0 and server.service.router.num_waiting == 0
        series = scrape(server)
        assert value(series, "requests_total", finish_reason="abort") > 100
        assert post(server).status_code == 200


def test_the_event_loop_is_not_held_up_by_a_large_prompt(folder: Path) -> None:
    """The loop's own lag while 1 MB is parsed, tokenised and checked."""
    import asyncio

    async def watch(stop: threading.Event) -> float:
        worst_s = 0.0
        while not stop.is_set():
            begin_s = time.perf_counter()
            await asyncio.sleep(0.002)
            worst_s = max(worst_s, time.perf_counter() - begin_s - 0.002)
        return worst_s

    def encode(text: str, **options: Any) -> list[int]:
        time.sleep(0.1)  # as a library does it: without Python
        return [97] * (len(text) // 4)

    body = json.dumps({"prompt": "word " * 200_000, "max_tokens": 1}).encode()
    with running(folder, loop=FakeLoop(fake_info(max_seq_len=1 << 21, kv_num_blocks=1 << 17))) as server:
        tokenizer: Any = server.service.kitchen().tokenizer
        tokenizer.encode = encode
        lags: list[float] = []
        for _ in range(4):
            stop = threading.Event()
            watching = asyncio.run_coroutine_threadsafe(watch(stop), server.loop)
            assert httpx.post(f"{server.url}/v1/completions", content=body, timeout=20).status_code == 200
            stop.set()
            lags.append(watching.result(5))
    # Other programs of the machine may hold it up too, but not each time.
    assert min(lags) < 0.05, lags
