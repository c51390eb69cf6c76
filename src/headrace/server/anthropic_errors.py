"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from headrace.front.errors import RequestError
from headrace.server.errors import error_response

__all__ = ["ANTHROPIC_PATHS", "anthropic_error_body", "anthropic_error_response"]

ANTHROPIC_PATHS = "/v1/messages"
"""What the paths of its routes begin with."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(error: RequestError) -> dict[str, Any]:
    """The field's name is in the message, too: in Anthropic's own form it has no place."""
    param = error.param or ""
    names_it = not param or param.split("[")[0].split(".")[0] in error.message
    message = error.message if names_it else f"{param}: {error.message}"
    known = {name: value for name, value in (("param", error.param), ("code", error.code)) if value is not None}
    return {"type": "error", "error": {"type": TYPES.get(error.status, "api_error"), "message": message, **known}}


def anthropic_error_response(error: RequestError) -> Response:
    return error_response(error, body=anthropic_error_body)
