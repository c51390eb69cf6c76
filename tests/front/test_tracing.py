"""Spans of the offline API; what a span has is tested with the server (tests/server/test_tracing.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace import llm as module
from headrace.front.tracing import tracer_over
from headrace.llm import LLM
from headrace.params import SamplingParams
from tests.test_llm import make_llm

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def traced(tmp_path: Path, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(module, "open_tracer", lambda endpoint: tracer_over(provider))
    with make_llm(tmp_path, otlp_traces_endpoint="http://collector:4317") as found:
        yield found


def test_each_prompt_is_a_span(traced: LLM, exporter: InMemorySpanExporter) -> None:
    traced.generate(["abc", "de"], SamplingParams(max_tokens=3, n=2, temperature=1.0), use_tqdm=False)
    traced.shutdown()
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    assert len(roots) == 2 and len(spans) == 8
    for root in roots:
        assert root.name == "text_completion fake" and root.attributes is not None
        assert root.attributes["gen_ai.request.choice.count"] == 2
        assert root.attributes["gen_ai.usage.output_tokens"] == 6


def test_it_belongs_to_the_trace_that_is_named(traced: LLM, exporter: InMemorySpanExporter) -> None:
    traced.generate_async("abc", SamplingParams(max_tokens=3), trace_headers={"traceparent": PARENT}).result()
    traced.shutdown()
    root = exporter.get_finished_spans()[-1]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT.split("-")[2]


def test_or_else_to_the_one_that_its_caller_is_in(
    traced: LLM, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    with provider.get_tracer("caller").start_as_current_span("outer") as outer:
        traced.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
    traced.shutdown()
    (root,) = [span for span in exporter.get_finished_spans() if span.name == "text_completion fake"]
    assert root.parent is not None and root.parent.span_id == outer.get_span_context().span_id


def test_a_bad_address_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint: 'ftp://x' is no address"):
        make_llm(tmp_path, otlp_traces_endpoint="ftp://x")


def test_what_waits_for_an_end_displaces_nothing_else(tmp_path: Path) -> None:
    """A bar that waits for the end of a request took the place of what gives its logits processors back."""
    ended: list[str] = []
    with make_llm(tmp_path) as llm:
        output = llm.generate_async("abc", SamplingParams(max_tokens=3))
        output.when_done(lambda _: ended.append("first"))
        output.when_done(lambda _: ended.append("second"))
        output.result()
    assert sorted(ended) == ["first", "second"]
