"""Spans of requests: joined to the caller's trace, without gaps, and sent where the option says."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.front.fake import FakeLoop, fake_info
from headrace.front.tracing import NO_TRACE, NO_TRACES, Tracer, open_tracer, tracer_over
from headrace.server.service import Operations

from .harness import MODEL, Server, running
from .test_service import is_empty, send_and_leave, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def loop() -> FakeLoop:
    return FakeLoop(fake_info())


@pytest.fixture(scope="module")
def traced(
    exporter: InMemorySpanExporter, loop: FakeLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    options = Operations(tracer=tracer_over(provider))
    with running(tmp_path_factory.mktemp("model"), loop=loop, step_s=0.002, operations=options) as server:
        yield server


def post(server: Server, path: str = "completions", **body: Any) -> httpx.Response:
    headers = {"traceparent": PARENT, **body.pop("headers", {})}
    body = {"max_tokens": 4, **body} if path != "embeddings" else body
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=20)


def trace_of(exporter: InMemorySpanExporter, count: int) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of the request and its children, of `count` in all."""
    assert until(lambda: len(exporter.get_finished_spans()) >= count)
    spans = exporter.get_finished_spans()
    exporter.clear()
    assert len(spans) == count
    return spans[-1], list(spans[:-1])


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def assert_without_gaps(root: ReadableSpan, phases: list[ReadableSpan]) -> None:
    edges = [times(span) for span in phases]
    assert edges[0][0] == times(root)[0] and edges[-1][1] == times(root)[1]
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert sum(end - start for start, end in edges) == times(root)[1] - times(root)[0]
    context = root.context
    assert context is not None
    assert all(span.parent is not None and span.parent.span_id == context.span_id for span in phases)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(traced: Server, exporter: InMemorySpanExporter, stream: bool) -> None:
    answer = post(
        traced, "chat/completions", messages=[{"role": "user", "content": "hi"}], temperature=0.5, stop=["zzz"],
        stream=stream, headers={"x-request-id": "mine"},
    )  # fmt: skip
    assert answer.status_code == 200
    root, phases = trace_of(exporter, 4)
    assert root.name == f"chat {MODEL}" and root.kind is SpanKind.SERVER
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert_without_gaps(root, phases)
    assert root.parent is not None and root.context is not None
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2] and root.parent.is_remote
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == MODEL
    assert found["gen_ai.response.id"] == "mine" and found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.usage.output_tokens"] == 4 and found["gen_ai.usage.input_tokens"] > 4
    assert found["gen_ai.request.temperature"] == 0.5 and found["gen_ai.request.stop_sequences"] == ("zzz",)
    assert found.get("gen_ai.request.stream", False) is stream
    assert 0 < found["gen_ai.response.time_to_first_chunk"] < 20
    assert root.status.status_code is StatusCode.UNSET


def test_several_choices_and_prompts_are_one_request(traced: Server, exporter: InMemorySpanExporter) -> None:
    assert post(traced, prompt=["ab", "cd"], n=2).status_code == 200
    root, phases = trace_of(exporter, 4)
    assert_without_gaps(root, phases)
    found = attributes(root)
    assert root.name == f"text_completion {MODEL}"
    assert found["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert found["gen_ai.usage.output_tokens"] == 16 and found["gen_ai.request.choice.count"] == 2


def test_without_a_callers_trace_it_is_one_of_its_own(traced: Server, exporter: InMemorySpanExporter) -> None:
    body = {"prompt": "ab", "max_tokens": 2}
    start_ns = time.monotonic_ns()
    assert httpx.post(f"{traced.url}/v1/completions", json=body, timeout=20).status_code == 200
    took_ns = time.monotonic_ns() - start_ns
    root, phases = trace_of(exporter, 4)
    assert root.parent is None
    assert_without_gaps(root, phases)
    start, end = times(root)
    assert 0 < end - start < took_ns, "the client sees a little more"


def test_embeddings(traced: Server, exporter: InMemorySpanExporter) -> None:
    assert post(traced, "embeddings", input="ab").status_code == 200
    root, phases = trace_of(exporter, 2)
    assert root.name == f"embeddings {MODEL}" and "gen_ai.usage.output_tokens" not in attributes(root)
    assert_without_gaps(root, phases)


def test_one_that_is_refused(traced: Server, exporter: InMemorySpanExporter) -> None:
    assert post(traced, prompt="ab", n=0).status_code == 400
    root, phases = trace_of(exporter, 1)
    assert not phases and root.status.status_code is StatusCode.ERROR
    assert attributes(root)["error.type"] == "400" and "n" in (root.status.description or "")


def test_one_whose_client_leaves(traced: Server, exporter: InMemorySpanExporter, loop: FakeLoop) -> None:
    body = '{"prompt": "abc", "max_tokens": 3000, "stream": true}'
    send_and_leave(traced, body, after=lambda: len(loop.running) == 1)
    assert until(lambda: is_empty(traced, loop))
    assert until(lambda: bool(exporter.get_finished_spans()))
    spans = exporter.get_finished_spans()
    exporter.clear()
    assert_without_gaps(spans[-1], list(spans[:-1]))
    assert attributes(spans[-1])["error.type"] == "499"
    assert attributes(spans[-1])["gen_ai.response.finish_reasons"] == ("cancelled",)


def test_a_fault(traced: Server, exporter: InMemorySpanExporter, loop: FakeLoop) -> None:
    loop.fault = "broken kernel"
    try:
        assert post(traced, prompt="ab").status_code == 500
    finally:
        loop.fault = ""
    assert until(lambda: bool(exporter.get_finished_spans()))
    root = exporter.get_finished_spans()[-1]
    exporter.clear()
    assert attributes(root)["error.type"] == "request_failed" and root.status.status_code is StatusCode.ERROR


def test_what_the_caller_does_not_sample_is_not_recorded(traced: Server, exporter: InMemorySpanExporter) -> None:
    assert post(traced, prompt="ab", headers={"traceparent": PARENT[:-2] + "00"}).status_code == 200
    assert post(traced, prompt="ab").status_code == 200
    trace_of(exporter, 4)


# ---- where they go ---------------------------------------------------------------------------


def test_off_is_an_object_that_does_nothing() -> None:
    assert open_tracer(None) is NO_TRACES
    assert NO_TRACES.begin({"traceparent": PARENT}) is NO_TRACE
    assert Operations().tracer is NO_TRACES


def one_request(folder: Path, tracer: Tracer) -> None:
    with running(folder, operations=Operations(tracer=tracer)) as server:
        assert post(server, prompt="ab").status_code == 200


def names_in(body: bytes) -> list[str]:
    request = ExportTraceServiceRequest.FromString(body)
    (resource,) = request.resource_spans
    services = [pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"]
    assert services == ["headrace"]
    return sorted(span.name for scope in resource.scope_spans for span in scope.spans)


WANTED = ["decode", "prefill", "queue", f"text_completion {MODEL}"]


def test_a_collector_over_http(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one_request(folder, open_tracer(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    ((path, body),) = got
    assert path == "/v1/traces" and names_in(body) == WANTED


def test_a_collector_over_grpc(folder: Path) -> None:
    got: list[bytes] = []

    class Collector(trace_service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.append(request.SerializeToString())
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    one_request(folder, open_tracer(f"http://127.0.0.1:{port}"))
    server.stop(0)
    (body,) = got
    assert names_in(body) == WANTED


def test_a_collector_that_is_gone_holds_nothing_up(folder: Path) -> None:
    start_s = time.monotonic()
    one_request(folder, open_tracer("http://127.0.0.1:9"))
    assert time.monotonic() - start_s < 15


@pytest.mark.parametrize(
    ("endpoint", "protocol", "message"),
    [
        ("ftp://host", "grpc", "no address"),
        ("http://", "grpc", "no address"),
        ("nonsense", "grpc", "has no port"),
        ("http://collector", "grpc", "has no port"),
        ("host:4318", "http/protobuf", "no URL"),
        ("http://host:4318", "carrier-pigeon", "is not known"),
    ],
)
def test_bad_addresses(endpoint: str, protocol: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ValueError, match=message):
        open_tracer(endpoint)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint: .*install headrace\[otel\]"):
        open_tracer("http://127.0.0.1:4317")
