"""The gRPC server: address, keys, TLS, health, reflection."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace import wire
from headrace.front.errors import RequestError
from headrace.server.metrics import Metrics
from headrace.server.rpc.messages import POOL, SERVICE, add_file
from headrace.server.rpc.servicer import Servicer, headers_of, refuse
from headrace.server.service import Service
from headrace.server.tenancy import key_of

__all__ = ["RpcServer", "TlsFiles"]

MAX_MESSAGE_BYTES = 64 << 20
"""As of HTTP bodies."""
FLUSH_TIMEOUT_S = 5
HEALTH_PERIOD_S = 0.2
KEEPALIVE_MS = 30_000
HEALTH = "grpc.health.v1.Health"
HealthServicer: Any = cast("Any", health).aio.HealthServicer
REFLECTION: str = reflection.SERVICE_NAME
OPEN_METHODS = (f"/{HEALTH}/", f"/{SERVICE}/HealthCheck")
"""They need no key, as /health."""

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]

add_file(health_pb2.DESCRIPTOR)
add_file(reflection_pb2.DESCRIPTOR)


class TlsFiles(Protocol):
    """PEM files; checked before."""

    @property
    def certfile(self) -> str: ...
    @property
    def keyfile(self) -> str | None: ...
    @property
    def ca_certs(self) -> str | None: ...


class RpcServer:
    """A way into `service`. Implements `run.Way`."""

    def __init__(self, service: Service, place: socket.socket, tls: TlsFiles | None, version: str) -> None:
        """`place` holds the address; other server processes may share it."""
        self._service = service
        self._place = place
        self._tls = tls
        self._servicer = Servicer(service, version)
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        keys, metrics = self._service.options.api_keys, self._service.meter.metrics
        server = grpc.aio.server(interceptors=[_Keys(keys, metrics)] if keys else [], options=OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._servicer.handlers()),))
        told = HealthServicer()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH, _health_handlers(told)),))
        reflection.enable_server_reflection((SERVICE, HEALTH, REFLECTION), server, pool=POOL)
        try:
            self._listen(server)
        except RuntimeError as error:
            self._service.fail(wire.Failed(f"can't listen on {self._address}: {error}: choose another --port"))
            return
        await server.start()
        telling = asyncio.create_task(self._tell_health(told))
        await self._stopping.wait()
        telling.cancel()
        await told.enter_graceful_shutdown()
        await server.stop(FLUSH_TIMEOUT_S)

    def stop(self) -> None:
        self._stopping.set()

    @property
    def _address(self) -> str:
        host, port = self._place.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _listen(self, server: grpc.aio.Server) -> None:
        if self._tls is None:
            server.add_insecure_port(self._address)
            return
        chain = Path(self._tls.certfile).read_bytes()
        key = chain if self._tls.keyfile is None else Path(self._tls.keyfile).read_bytes()
        roots = None if self._tls.ca_certs is None else Path(self._tls.ca_certs).read_bytes()
        credentials = grpc.ssl_server_credentials([(key, chain)], roots, roots is not None)
        server.add_secure_port(self._address, credentials)

    async def _tell_health(self, told: Any) -> None:
        """SERVING is what /health/ready has 200 for."""
        status = health_pb2.HealthCheckResponse
        while True:
            is_ready = self._service.state == "ready" and not self._service.stall.is_stalled
            for name in ("", SERVICE):
                await told.set(name, status.SERVING if is_ready else status.NOT_SERVING)
            await asyncio.sleep(HEALTH_PERIOD_S)


class _Keys(grpc.aio.ServerInterceptor):
    """Every method needs a key, but for health. Keys are compared in constant time and never logged."""

    def __init__(self, keys: Sequence[str], metrics: Metrics) -> None:
        self._keys = [key.encode() for key in keys]
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(OPEN_METHODS):
            return await continuation(handler_call_details)
        sent = key_of(headers_of(handler_call_details.invocation_metadata)).encode("utf-8", "surrogateescape")
        # All keys are compared, so that the time doesn't tell which one matched.
        if sum(hmac.compare_digest(sent, key) for key in self._keys) > 0:
            return await continuation(handler_call_details)
        make: Any = grpc.unary_unary_rpc_method_handler
        return make(self._refuse)

    async def _refuse(self, request: Any, context: Any) -> None:
        self._metrics.count("request_error", "401")
        message = "this server needs an API key: send it as metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'"
        await refuse(context, RequestError(message, code="invalid_api_key", status=401))


def _health_handlers(told: Any) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    request, response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    return {
        "Check": grpc.unary_unary_rpc_method_handler(told.Check, request.FromString, response.SerializeToString),
        "Watch": grpc.unary_stream_rpc_method_handler(told.Watch, request.FromString, response.SerializeToString),
    }
