"""Taking a request's body from the socket: what it may be, how large, how slow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect, Request

from headrace.front.errors import RequestError
from headrace.server.errors import Unavailable

__all__ = ["MAX_BODY_BYTES", "BodyRoom", "read_json"]

MAX_BODY_BYTES = 64 << 20
PAUSE_TIMEOUT_S = 30.0
"""Longest silence of a client in the middle of its body."""
LEAST_BYTES_PER_S = 4096
"""Of a body, on average and beyond the pause that it may have."""
SMALL_BODY_BYTES = 1 << 18
"""Up to it bodies are not counted."""
ROOM_BYTES = 2 * MAX_BODY_BYTES
"""Of larger ones that are read and prepared at once: as Python's values they take twenty times as much."""
ROOM_TIMEOUT_S = 30.0
ROOM_RETRY_S = 5


class BodyRoom:
    """What all large bodies together may take. Those that find no room wait, unread. Used on one event loop."""

    def __init__(self, num_bytes: int = ROOM_BYTES) -> None:
        self._free_bytes = num_bytes
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncGenerator[None]:
        """Raises Unavailable: there is none for a while."""
        deadline_s = time.monotonic() + ROOM_TIMEOUT_S
        while num_bytes > self._free_bytes:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await asyncio.wait({future}, timeout=max(deadline_s - time.monotonic(), 0))
            if not future.done():
                self._waiting.remove(future)
                raise Unavailable("too many large bodies at once", code="overloaded", retry_after_s=ROOM_RETRY_S)
        self._free_bytes -= num_bytes
        try:
            yield
        finally:
            self._free_bytes += num_bytes
            for future in self._waiting:
                future.set_result(None)
            self._waiting.clear()


@contextlib.asynccontextmanager
async def read_json(request: Request) -> AsyncGenerator[bytes]:
    """The body, not parsed yet; for as long as it is needed.

    Raises:
        RequestError: another kind than JSON (415), too large (413), its client has fallen silent or is too slow (408),
            or there is no room for it (503).
        ClientDisconnect: the client has left.
    """
    _check_kind(request)
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    room: BodyRoom = request.app.state.bodies
    is_chunked = "transfer-encoding" in request.headers
    num_bytes = MAX_BODY_BYTES if is_chunked else int(announced)
    if num_bytes <= SMALL_BODY_BYTES:
        yield await _read(request)
        return
    async with room.take(num_bytes):
        yield await _read(request)


async def _read(request: Request) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    more = True
    began_s = time.monotonic()
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), PAUSE_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise _too_slow() from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        more = message.get("more_body", False)
        if more and num_bytes < LEAST_BYTES_PER_S * (time.monotonic() - began_s - PAUSE_TIMEOUT_S):
            raise _too_slow()
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


def _too_slow() -> RequestError:
    return RequestError("the body stopped half-way: send it whole", code="timeout", status=408)
