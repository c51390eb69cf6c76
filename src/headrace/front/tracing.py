"""OpenTelemetry spans of requests: one for each, joined to its caller's trace, with its phases as children.

The spans are made when a request has ended, from the times that it has anyway, so a request that runs costs nothing
more. Attributes are those of the semantic conventions for generative AI, where there is one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from headrace import env
from headrace.front.collector import Collector
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage

if TYPE_CHECKING:
    import opentelemetry.trace as otel
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["NO_TRACE", "NO_TRACES", "Ended", "Told", "Trace", "Tracer", "open_tracer", "tracer_over"]

SERVICE = "headrace"
PHASES = ("queue", "prefill", "decode")
CARRIED = ("traceparent", "tracestate")
FLUSH_TIMEOUT_S = 3.0
"""For the last spans, when the server ends; a collector that is gone shall not hold it up."""
HTTP_PATH = "/v1/traces"

Attributes = Mapping[str, "str | bool | int | float | Sequence[str]"]


class Told(Protocol):
    """What a span says of a request beside its collectors."""

    @property
    def operation(self) -> str:
        """As the conventions call it: chat, text_completion, embeddings."""
        ...

    @property
    def model(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def n(self) -> int: ...

    @property
    def stream(self) -> bool: ...


class Ended(Protocol):
    """A request that was accepted."""

    @property
    def answer(self) -> Told: ...

    @property
    def collectors(self) -> Sequence[Collector]: ...


class Trace(Protocol):
    """The span of one request. Exactly one of the two is called, once."""

    def end(self, job: Ended, error: RequestError | None) -> None:
        """It has been answered, given up by its client, or failed."""
        ...

    def refuse(self, error: RequestError) -> None:
        """It never ran."""
        ...


class Tracer(Protocol):
    """Makes the spans of a server process."""

    def begin(self, headers: Mapping[str, str]) -> Trace:
        """A request is there; its headers may name the trace that it belongs to, or else it is the caller's own."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet; takes a few seconds at most."""
        ...


class _NoTrace:
    def end(self, job: Ended, error: RequestError | None) -> None:
        pass

    def refuse(self, error: RequestError) -> None:
        pass


class _NoTraces:
    def begin(self, headers: Mapping[str, str]) -> Trace:
        return NO_TRACE

    def close(self) -> None:
        pass


NO_TRACE: Trace = _NoTrace()
NO_TRACES: Tracer = _NoTraces()


def open_tracer(endpoint: str | None) -> Tracer:
    """One that sends to an OTLP collector, or that does nothing without an `endpoint`.

    gRPC is spoken unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (or OTEL_EXPORTER_OTLP_PROTOCOL) is http/protobuf. What is
    sampled, how spans are batched, headers and the service's name are read by the SDK from its usual variables.

    Raises:
        ValueError: an endpoint or protocol that can't be used, or packages that are missing.
    """
    if endpoint is None:
        return NO_TRACES
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(endpoint, env.otlp_traces_protocol())
    except ImportError as error:
        raise ValueError(
            f"otlp_traces_endpoint: needs the package {(error.name or 'opentelemetry').split('.')[0]}:"
            " install headrace[otel]"
        ) from None
    # The SDK puts OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES over what is given here only where they are set.
    known = Resource.create()
    name = known.attributes.get(SERVICE_NAME)
    if not isinstance(name, str) or name.startswith("unknown_service"):
        known = known.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(resource=known, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return tracer_over(provider)


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    parts = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ValueError(f"otlp_traces_endpoint: '{endpoint}' is no address: give http://host:4317")
    if protocol == "grpc":
        if not re.search(r":\d+$", parts.netloc) and parts.scheme != "https":
            raise ValueError(f"otlp_traces_endpoint: '{endpoint}' has no port: give http://host:4317")
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=parts.netloc, insecure=parts.scheme != "https")
    if protocol != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: '{protocol}' is not known: set grpc or http/protobuf")
    if "://" not in endpoint or parts.scheme == "grpc":
        raise ValueError(f"otlp_traces_endpoint: '{endpoint}' is no URL: give http://host:4318 for http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint if parts.path.strip("/") else endpoint.rstrip("/") + HTTP_PATH)


def tracer_over(provider: TracerProvider) -> Tracer:
    """One whose spans go where `provider` sends them; it is shut down with it."""
    return _Spans(provider)


class _Spans:
    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.context import get_current
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._current = get_current
        self._provider = provider
        self.tracer = provider.get_tracer(SERVICE)
        self._extract = TraceContextTextMapPropagator().extract

    def begin(self, headers: Mapping[str, str]) -> Trace:
        carried = {name: headers[name] for name in CARRIED if name in headers}
        return _Span(self.tracer, self._extract(carried, self._current()), time.monotonic())

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="headrace-traces-end", daemon=True)
        closing.start()
        closing.join(FLUSH_TIMEOUT_S)


@dataclass(frozen=True)
class _Span:
    tracer: otel.Tracer
    parent: Context
    arrived_s: float

    def end(self, job: Ended, error: RequestError | None) -> None:
        bounds = bounds_of(job.collectors, end_s=time.monotonic())
        self._write(f"{job.answer.operation} {job.answer.model}", bounds, attributes_of(job, bounds), error)

    def refuse(self, error: RequestError) -> None:
        self._write("request", [self.arrived_s, time.monotonic()], {"gen_ai.provider.name": SERVICE}, error)

    def _write(self, name: str, bounds: Sequence[float], attributes: Attributes, error: RequestError | None) -> None:
        """The phases lie between the bounds, so they fill the request's time."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        tracer, to_ns = self.tracer, _clock()
        span = tracer.start_span(
            name,
            self.parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=to_ns(bounds[0]),
        )
        if span.is_recording() and error is not None:
            span.set_attribute("error.type", error.code or str(error.status))
            span.set_status(Status(StatusCode.ERROR, error.message))
        if span.is_recording() and "gen_ai.operation.name" in attributes:
            within = set_span_in_context(span)
            for phase, (start_s, end_s) in zip(PHASES, pairwise(bounds)):
                tracer.start_span(phase, within, start_time=to_ns(start_s)).end(to_ns(end_s))
        span.end(to_ns(bounds[-1]))


def bounds_of(collectors: Sequence[Collector], *, end_s: float) -> list[float]:
    """Seconds of time.monotonic(), growing: arrival, first step, first token, end; as far as it came.

    Of several choices the first one counts that began, as for `Server-Timing`. A request that was given up before its
    first token was waiting, as far as is known on this side.
    """
    times = [choice.times for collector in collectors for choice in collector.choices if choice.times is not None]
    arrival_s = min(collector.arrival_s for collector in collectors)
    scheduled_s = min((one.first_scheduled_s for one in times if one.first_scheduled_s), default=0.0)
    first_s = min((one.first_token_s for one in times if one.first_token_s), default=0.0)
    bounds = [arrival_s]
    for known_s in (scheduled_s or first_s, first_s):
        if known_s:
            bounds.append(max(known_s, bounds[-1]))
    return [*bounds, max(end_s, bounds[-1])]


def attributes_of(job: Ended, bounds: Sequence[float]) -> Attributes:
    """What the request asked for and got."""
    answer, collectors = job.answer, job.collectors
    params, first = collectors[0].params, collectors[0].first
    usage = TokenUsage(0, 0, 0)
    for collector in collectors:
        usage = usage + collector.usage()
    found: dict[str, str | bool | int | float | Sequence[str] | None] = {
        "gen_ai.operation.name": answer.operation,
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.model": answer.model,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.id": answer.id,
        "gen_ai.response.finish_reasons": [
            choice.finish or "cancelled" for collector in collectors for choice in collector.choices
        ],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.conversation.id": first.conversation or None,
    }
    if not first.pooling:
        found |= {
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.request.max_tokens": first.max_tokens,
            "gen_ai.request.temperature": first.sampling.temperature,
            "gen_ai.request.top_p": first.sampling.top_p,
            "gen_ai.request.top_k": first.sampling.top_k or None,
            "gen_ai.request.frequency_penalty": first.sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": first.sampling.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.stream": answer.stream or None,
            "gen_ai.request.stop_sequences": _stops(params.stop),
            "gen_ai.request.choice.count": answer.n if answer.n > 1 else None,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
            "gen_ai.response.time_to_first_chunk": bounds[2] - bounds[0] if len(bounds) == 4 else None,
        }
    return {name: value for name, value in found.items() if value is not None}


def _stops(stop: str | Sequence[str] | None) -> list[str] | None:
    return [stop] if isinstance(stop, str) else list(stop or ()) or None


def _clock() -> Callable[[float], int]:
    """From time.monotonic() to nanoseconds since 1970, as both clocks stand now."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda seconds: int(seconds * 1e9) + offset_ns
