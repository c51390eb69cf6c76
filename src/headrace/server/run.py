"""The life of a server process: socket, runtime, signals, draining, the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn

from headrace import wire
from headrace.front.socket_link import ChildRuntime, cause_of_death
from headrace.front.text_side import TextSide
from headrace.log import get
from headrace.server.app import make_app
from headrace.server.protocol import Connection
from headrace.server.service import Service, ServiceOptions

__all__ = ["Fronts", "Outcome", "Process", "Tls", "Way", "bind", "is_public", "serve", "url_of"]

log = get("server")

WATCH_PERIOD_S = 0.2
LAST_WORDS_S = 0.3
"""How long a message of a runtime that has just died may still be on its way."""
FLUSH_TIMEOUT_S = 5
"""For clients to take the last bytes of their answers."""
BACKLOG = 2048
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
READY_PERIOD_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a server ended."""

    exit_code: int
    message: str = ""
    """The root cause, when it failed."""
    traceback: str = ""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow happens.

    Raises:
        OSError: the address can't be had; one line with the remedy.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"can't listen on {host}: {error.strerror or error}: choose another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise OSError(f"can't listen on {host} port {port}: {reason}: {_remedy(error)}") from None
    listener.setblocking(False)
    return listener


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address: choose another --host"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "choose a --port from 1024 up"
    return "end what uses it or choose another --port"


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def is_public(listener: socket.socket) -> bool:
    """Whether other machines may reach it."""
    return not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


@dataclass(frozen=True)
class Tls:
    """PEM files; checked before."""

    certfile: str
    keyfile: str | None = None
    password: str | None = None
    ca_certs: str | None = None
    """With it, clients have to show a certificate."""

    def options(self) -> dict[str, Any]:
        """uvicorn's."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_keyfile_password": self.password,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": ssl.CERT_NONE if self.ca_certs is None else ssl.CERT_REQUIRED,
        }


class Fronts(Protocol):
    """Further server processes, which share the listener and the runtime."""

    def start(self, runtime: ChildRuntime, listener: socket.socket) -> None: ...

    @property
    def cause_of_death(self) -> str:
        """One line on a process that has ended though nobody told it to; "" while all live."""
        ...

    def signal(self, number: signal.Signals) -> None: ...

    def tell_end(self, runtime: ChildRuntime) -> None:
        """The runtime has ended."""
        ...

    def close(self, timeout_s: float) -> None:
        """None is left afterwards; safe to call twice."""
        ...


class _NoFronts:
    cause_of_death = ""

    def start(self, runtime: ChildRuntime, listener: socket.socket) -> None:
        pass

    def signal(self, number: signal.Signals) -> None:
        pass

    def tell_end(self, runtime: ChildRuntime) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


NO_FRONTS: Fronts = _NoFronts()


class Way(Protocol):
    """A way into the service: a server of one protocol on one address."""

    async def serve(self) -> None:
        """Until `stop`, and until what is under way has been answered."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Process:
    """What this server process is beside its service."""

    tls: Tls | None = None
    fronts: Fronts = NO_FRONTS
    rpc: Callable[[Service], Way] | None = None
    """gRPC has the listener's address; HTTP is at `http_listener`, if there is one."""
    http_listener: socket.socket | None = None
    pulse: Path | None = None
    """A file that the event loop touches as long as it turns."""
    waits_until_ready: bool = False
    """Takes no connection before it can answer: another process does meanwhile."""


def serve(
    listener: socket.socket,
    runtime: ChildRuntime,
    load_text: Callable[[], TextSide],
    options: ServiceOptions,
    *,
    version: str,
    process: Process | None = None,
) -> Outcome:
    """Serve until a signal or a failure. No child is left when it returns."""
    _allow_connections()
    outcome = asyncio.run(_Life(listener, runtime, load_text, options, version, process or Process()).run())
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # else the interpreter's end makes them deadly again
    return outcome


def _allow_connections() -> None:
    """A connection is a file; the usual limit of 1,024 is for programs that wait with `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Uvicorn(uvicorn.Server):
    """Signals are ours: a drain comes before the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Http:
    """Implements `Way`."""

    def __init__(self, service: Service, listener: socket.socket, version: str, tls: Tls | None) -> None:
        self._listener = listener
        config = uvicorn.Config(
            make_app(service, version=version),
            lifespan="off",
            ws="none",
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            **({} if tls is None else tls.options()),
        )
        self._server = _Uvicorn(config)

    async def serve(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._server.should_exit = True


class _Life:
    def __init__(
        self,
        listener: socket.socket,
        runtime: ChildRuntime,
        load_text: Callable[[], TextSide],
        options: ServiceOptions,
        version: str,
        process: Process,
    ) -> None:
        self._listener = listener
        self._runtime = runtime
        self._options = options
        self._process = process
        scheme = "grpc" if process.rpc is not None else "http"
        self._url = url_of(listener, scheme=scheme if process.tls is None else f"{scheme}s")
        self._service = Service(options, load_text)
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._drain_until_s = 0.0
        self._ways: list[Way] = [] if process.rpc is None else [process.rpc(self._service)]
        http = listener if process.rpc is None else process.http_listener
        if http is not None:
            self._ways.append(_Http(self._service, http, version, process.tls))

    async def run(self) -> Outcome:
        self._take_signals(asyncio.get_running_loop())
        serving = asyncio.create_task(self._serve())
        watching = asyncio.create_task(self._watch())
        fronts = self._process.fronts
        try:
            self._runtime.start()
            self._service.start(self._runtime.address)
            fronts.start(self._runtime, self._listener)
            log.info("listening on %s, loading %s", self._url, self._options.model_name)
            if self._process.http_listener is not None:
                log.info("HTTP is at %s", url_of(self._process.http_listener))
            await self._until_end(serving)
            for way in self._ways:
                way.stop()
            await asyncio.wait({serving}, timeout=FLUSH_TIMEOUT_S + 1)
        finally:
            await self._service.close()
            await asyncio.to_thread(fronts.close, self._drain_left_s + FLUSH_TIMEOUT_S + 1)
            watching.cancel()
            await asyncio.to_thread(self._runtime.close, 4.0)
        return self._outcome()

    async def _serve(self) -> None:
        while self._process.waits_until_ready and self._service.state == "loading":
            await asyncio.sleep(READY_PERIOD_S)
        await asyncio.gather(*(way.serve() for way in self._ways))

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """For good: the loop's own handlers would be gone with it, and a signal at the last moment change the end."""

        def take(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and everything with it
                loop.call_soon_threadsafe(self._on_signal, signal.Signals(number))

        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: it shall outlive its terminal
            signal.signal(number, take)

    def _on_signal(self, number: signal.Signals) -> None:
        first = not self._stop.is_set()
        log.info("%s: %s", number.name, "stopping" if first else "stopping at once")
        (self._stop if first else self._force).set()
        self._process.fronts.signal(number)

    async def _until_end(self, serving: asyncio.Task[None]) -> None:
        """Return when nothing is running any more, and nothing shall."""
        service = self._service
        stopping = asyncio.create_task(self._stop.wait())
        was_ready = False
        while service.failure is None and not self._stop.is_set() and not serving.done():
            if service.state == "ready" and not was_ready:
                was_ready = True
                log.info("ready: %s at %s%s", self._options.model_name, self._url, "" if self._process.rpc else "/v1")
                if self._options.operations.page and not self._process.rpc:
                    log.info("the page is at %s/", self._url)
            changed = asyncio.create_task(service.changed.wait())
            await asyncio.wait({changed, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            service.changed.clear()
        stopping.cancel()
        if service.failure is None:
            await self._drain()

    async def _drain(self) -> None:
        service = self._service
        self._drain_until_s = time.monotonic() + self._options.shutdown_timeout_s
        service.drain()
        if service.jobs:
            log.info(
                "draining: %d requests have up to %g s (a second signal ends them)",
                len(service.jobs),
                self._options.shutdown_timeout_s,
            )
            drained = asyncio.create_task(self._until_idle())
            forced = asyncio.create_task(self._force.wait())
            await asyncio.wait(
                {drained, forced}, timeout=self._options.shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            drained.cancel()
            forced.cancel()
            service.end_all("the server is shutting down", code="shutting_down", status=503)
        log.info("stopped")

    @property
    def _drain_left_s(self) -> float:
        """What the other server processes may still need for their requests; a second signal is theirs, too."""
        if self._service.failure is not None or self._force.is_set():
            return 0.0
        return max(self._drain_until_s - time.monotonic(), 0.0)

    async def _until_idle(self) -> None:
        while self._service.jobs and self._service.failure is None:
            self._service.changed.clear()
            await self._service.changed.wait()

    async def _watch(self) -> None:
        """Notice a runtime, or another server process, that ends without a word."""
        fronts = self._process.fronts
        while self._runtime.returncode is None:
            if self._process.pulse is not None:
                with contextlib.suppress(OSError):  # its folder has gone with the first process
                    self._process.pulse.touch()
            if (cause := fronts.cause_of_death) and not self._stop.is_set():
                self._service.fail(wire.Failed(cause))
            await asyncio.sleep(WATCH_PERIOD_S)
        fronts.tell_end(self._runtime)
        await asyncio.sleep(LAST_WORDS_S)
        self._service.fail(wire.Failed(cause_of_death(self._runtime), bad_input=self._runtime.returncode == 2))

    def _outcome(self) -> Outcome:
        failure = self._service.failure
        if failure is None:
            return Outcome(0)
        return Outcome(2 if failure.bad_input else 1, failure.message, failure.traceback)
