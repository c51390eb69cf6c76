"""The HTTP protocol of a connection: the one that uvicorn has, with a time limit and JSON errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import msgspec
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headrace.front.errors import RequestError
from headrace.log import get
from headrace.server.errors import error_body

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Base
else:
    Base = AutoHTTPProtocol

__all__ = ["Connection"]

log = get("server")

HEAD_TIMEOUT_S = 30.0
"""From a connection's first byte, or its opening, to the end of a request's headers."""
TAKE_TIMEOUT_S = 30.0
"""A client that has taken nothing of what waits for it for so long is given up."""


class Connection(Base):
    """A client that sends half a request line and nothing more holds its connection for `HEAD_TIMEOUT_S` only, and one
    that doesn't read its answer for `TAKE_TIMEOUT_S`."""

    _head_timer: asyncio.TimerHandle | None = None
    _take_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._forget_taking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """What the socket doesn't take piles up: from now on nothing is added to it."""
        super().pause_writing()
        self._watch_taking(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._forget_taking()
        super().resume_writing()

    def _watch_taking(self, num_bytes: int) -> None:
        self._take_timer = self.loop.call_later(TAKE_TIMEOUT_S, self._check_taken, num_bytes)

    def _check_taken(self, before: int) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            self._watch_taking(waiting)
            return
        log.info("a client has taken nothing of its answer for %g s: its connection is closed", TAKE_TIMEOUT_S)
        self.transport.abort()

    def _forget_taking(self) -> None:
        if self._take_timer is not None:
            self._take_timer.cancel()
            self._take_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP request. Nothing can be said any more inside an answer that has begun."""
        log.debug("a client sent no HTTP request: %s", msg)
        if not self._answers:
            body = msgspec.json.encode(error_body(RequestError("this is no valid HTTP request", code="invalid_http")))
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    @property
    def _answers(self) -> bool:
        """Whether a request is under way; without one, this connection waits for headers."""
        cycle = cast("Any", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _watch_head(self) -> None:
        if self._answers or self.transport.is_closing():
            self._forget_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._answers:
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
