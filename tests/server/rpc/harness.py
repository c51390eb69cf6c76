"""A gRPC server over the fake runtime, on a thread of this process, and a client of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from headrace.front.fake import FakeLoop, FakeRuntimeProcess
from headrace.server.rpc.messages import SERVICE, message, methods
from headrace.server.rpc.place import reserve
from headrace.server.rpc.server import RpcServer
from headrace.server.run import Tls
from headrace.server.service import Service, ServiceOptions

from ..harness import MODEL, text_side

Code = grpc.StatusCode
GenerateRequest = message("GenerateRequest")


class Client:
    """Stubs of all methods."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._stubs: dict[str, Callable[..., Any]] = {}
        for name, method in methods().items():
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            self._stubs[name] = make(
                f"/{SERVICE}/{name}",
                request_serializer=message(method.input_type.full_name).SerializeToString,
                response_deserializer=message(method.output_type.full_name).FromString,
            )
        self.health = HealthStub(channel)

    def call(self, name: str, request: Any = None, **options: Any) -> Any:
        given = message(methods()[name].input_type.full_name)() if request is None else request
        return self._stubs[name](given, **{"timeout": 20, **options})

    def generate(self, request: Any, **options: Any) -> list[Any]:
        return list(self.call("Generate", request, **options))


@dataclass
class Running:
    address: str
    service: Service
    runtime: FakeRuntimeProcess
    loop: asyncio.AbstractEventLoop

    @contextmanager
    def client(self) -> Iterator[Client]:
        with grpc.insecure_channel(self.address) as channel:
            yield Client(channel)

    def is_empty(self) -> bool:
        return not self.service.jobs and self.runtime.loop.is_idle


@contextmanager
def running(
    folder: Path, *, loop: FakeLoop | None = None, step_s: float = 0.0, tls: Tls | None = None, **options: Any
) -> Iterator[Running]:
    """A gRPC server on a thread."""
    runtime = FakeRuntimeProcess(loop=loop, step_s=step_s)
    runtime.start()
    started: list[Running] = []
    up, stop = threading.Event(), threading.Event()

    async def run() -> None:
        service = Service(ServiceOptions(model_name=MODEL, **options), lambda: text_side(folder))
        place = reserve("127.0.0.1", 0)
        way = RpcServer(service, place, tls, "0")
        service.start(runtime.address)
        serving = asyncio.create_task(way.serve())
        while service.state == "loading":
            await asyncio.sleep(0.005)
        address = f"127.0.0.1:{place.getsockname()[1]}"
        started.append(Running(address, service, runtime, asyncio.get_running_loop()))
        up.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        way.stop()
        await serving
        await service.close()
        place.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert up.wait(20)
    try:
        yield started[0]
    finally:
        stop.set()
        thread.join(10)
        runtime.close()
        assert not thread.is_alive()


def request(ids: list[int] | None = None, **fields: Any) -> Any:
    made = GenerateRequest(**{"max_tokens": 4, **fields})
    made.tokenized.input_token_ids.extend([97, 98, 99] if ids is None else ids)
    return made


def refused(client: Client, given: Any, **options: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(given, **options)
    return caught.value


def count_of(server: Running, code: str) -> float:
    """Of answers with this error."""
    text = server.service.meter.metrics.render(None, {}, {}).decode()
    (line,) = [
        line for line in text.splitlines() if line.startswith("trtllm_request_error_total") and f'"{code}"' in line
    ]
    return float(line.split()[-1])


def details(error: Any, kind: Any) -> list[Any]:
    trailers = dict(error.trailing_metadata())
    found: list[Any] = []
    for packed in Status.FromString(trailers["grpc-status-details-bin"]).details:
        if packed.Is(kind.DESCRIPTOR):
            found.append(kind.FromString(packed.value))
    return found


def health(client: Client, name: str = SERVICE) -> int:
    return client.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
