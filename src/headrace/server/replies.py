"""Answers of routes that don't generate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headrace.front.errors import RequestError
from headrace.log import get
from headrace.server.errors import JSON, as_request_error, error_response

__all__ = ["GONE_STATUS", "Refuse", "gone", "json_response", "refusal_of", "reply"]

log = get("server")

GONE_STATUS = 499
"""Of an answer that nobody waits for."""

Refuse = Callable[[RequestError], Response]
"""Writes errors that come before the first byte, in a route's own form."""


def gone() -> Response:
    """For nobody: the client has left."""
    return Response(status_code=GONE_STATUS)


def json_response(values: Any) -> Response:
    return Response(values if isinstance(values, bytes) else msgspec.json.encode(values), media_type=JSON)


async def reply(work: Callable[[], Awaitable[Any]], refuse: Refuse = error_response) -> Response:
    """What `work` returns as JSON (bytes are JSON already); what it raises becomes `refuse`'s."""
    try:
        return json_response(await work())
    except ClientDisconnect:
        return gone()
    except Exception as error:
        return refuse(refusal_of(error))


def refusal_of(error: Exception) -> RequestError:
    """An error for the client; a fault of ours is logged."""
    refusal = as_request_error(error)
    if refusal.status == 500:
        log.exception("a request failed")
    return refusal
