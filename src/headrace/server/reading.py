"""Taking a request's body from the socket: what it may be, how large, how slow."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from headrace.front.errors import RequestError

__all__ = ["MAX_BODY_BYTES", "read_json"]

MAX_BODY_BYTES = 64 << 20
PAUSE_TIMEOUT_S = 30.0
"""Longest silence of a client in the middle of its body."""


async def read_json(request: Request) -> bytes:
    """The body, not parsed yet.

    Raises:
        RequestError: another kind than JSON (415), too large (413), or its client has fallen silent (408).
        ClientDisconnect: the client has left.
    """
    _check_kind(request)
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    num_bytes = 0
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), PAUSE_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise RequestError("the body stopped half-way: send it whole", code="timeout", status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_kind(request: Request) -> None:
    """A body without a kind is taken as JSON; forms and plain text are what any web page may send across sites."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(
            f"the body is {kind[:60]}: send JSON with 'Content-Type: application/json'",
            code="unsupported_media_type",
            status=415,
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            f"the body is encoded as {encoding[:60]}: send it plain", code="unsupported_encoding", status=415
        )


def _too_large() -> RequestError:
    return RequestError(
        f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: send less", code="body_too_large", status=413
    )
