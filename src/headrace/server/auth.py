"""API keys: every route needs one, but for the health checks."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.front.errors import RequestError
from headrace.server.errors import error_response

__all__ = ["ApiKeys"]

OPEN_PATHS = frozenset({"/health", "/health/ready"})


class ApiKeys:
    """ASGI middleware. Keys are compared in constant time and never logged."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        assert all(keys), "an empty key would open the server to requests without one"
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "this server needs an API key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key", status=401
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        sent = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, rest = value.partition(b" ")
                sent = rest.strip() if kind.lower() == b"bearer" else b""
        # All keys are compared, so that the time doesn't tell which one matched.
        return sum(hmac.compare_digest(sent, key) for key in self._keys) > 0
