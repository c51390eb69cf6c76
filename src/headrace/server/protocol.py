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


class Connection(Base):
    """A client that sends half a request line and nothing more holds its connection for `HEAD_TIMEOUT_S` only."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

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
