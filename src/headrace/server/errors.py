"""Errors as OpenAI clients expect them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.front.errors import RequestError
from headrace.server.sse import DONE, data_event

__all__ = ["Unavailable", "as_request_error", "error_body", "error_event", "error_response", "model_not_found"]

JSON = "application/json"

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Unavailable(RequestError):
    """The server can't take the request now; `retry_after_s` tells when it may."""

    def __init__(self, message: str, *, status: int = 503, code: str = "unavailable", retry_after_s: int = 1) -> None:
        super().__init__(message, code=code, status=status)
        self.retry_after_s = retry_after_s


def model_not_found(name: str, served: str) -> RequestError:
    return RequestError(
        f"the model {name!r} does not exist; this server has {served!r}",
        param="model",
        code="model_not_found",
        status=404,
    )


def as_request_error(error: Exception) -> RequestError:
    """Whatever went wrong while a request was prepared; only the caller's mistakes keep their message's detail."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, NotImplementedError):
        return RequestError(str(error), code="unsupported_parameter")
    return RequestError(f"internal error: {type(error).__name__}", code="internal_error", status=500)


def error_body(error: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: RequestError, *, body: Callable[[RequestError], dict[str, Any]] = error_body) -> Response:
    """`body` writes the error in a route's own form."""
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Unavailable) else None
    return Response(msgspec.json.encode(body(error)), error.status, headers, JSON)


def error_event(error: RequestError) -> bytes:
    """The error as the last event of a stream of chunks, with the end marker."""
    return data_event(error_body(error)) + DONE
