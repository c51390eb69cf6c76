"""API keys: every route needs one, but for the health checks."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.front.errors import RequestError
from headrace.server.anthropic_errors import ANTHROPIC_PATHS, anthropic_error_response
from headrace.server.errors import error_response
from headrace.server.tenancy import key_of

__all__ = ["METRICS_PATHS", "OPEN_PATHS", "ApiKeys"]

OPEN_PATHS = frozenset({"/health", "/health/ready"})
METRICS_PATHS = frozenset({"/metrics", "/prometheus/metrics"})


class ApiKeys:
    """ASGI middleware. Keys are compared in constant time and never logged."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        assert all(keys), "an empty key would open the server to requests without one"
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            status=401,
        )
        refuse = anthropic_error_response if scope["path"].startswith(ANTHROPIC_PATHS) else error_response
        await refuse(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        sent = key_of(Headers(scope=scope)).encode("utf-8", "surrogateescape")
        # All keys are compared, so that the time doesn't tell which one matched.
        return sum(hmac.compare_digest(sent, key) for key in self._keys) > 0
