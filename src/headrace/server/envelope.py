"""What every answer has, whoever makes it: an id in its header, and its place in the count of errors."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.metrics import Metrics
from headrace.server.replies import GONE_STATUS
from headrace.server.tenancy import REQUEST_ID_HEADER, Caller

__all__ = ["Envelope"]

_ID = REQUEST_ID_HEADER.encode()
_PROBES = "/health"
"""Answers below it are no requests that failed: a startup probe gets 503 for as long as a model loads."""


class Envelope:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        # No coroutine of its own: a stream comes by here with each of its pieces.
        def pass_on(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._complete(scope, message)
            return send(message)

        await self._app(scope, receive, pass_on)

    def _complete(self, scope: Scope, message: Message) -> None:
        status = message["status"]
        if status >= 400 and status != GONE_STATUS and not scope["path"].startswith(_PROBES):
            self._metrics.count("request_error", str(status))
        headers = message.setdefault("headers", [])
        if all(name != _ID for name, _ in headers):
            name = Caller.of(Headers(scope=scope)).request_id or f"req-{uuid.uuid4().hex}"
            message["headers"] = [*headers, (_ID, name.encode())]
