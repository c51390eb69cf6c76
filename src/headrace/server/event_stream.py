"""A response of server-sent events, fed piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.feed import Feed

__all__ = ["EventStream"]


class EventStream(Response):
    """Writes what the feed brings, one write for all that has gathered, until its last piece."""

    media_type = "text/event-stream"

    def __init__(
        self, feed: Feed, first: bytes, *, last: bool, headers: Mapping[str, str], on_end: Callable[[], None]
    ) -> None:
        self._feed = feed
        self._first = first
        self._last = last
        self._on_end = on_end
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            data, last = self._first, self._last
            while True:
                await send({"type": "http.response.body", "body": data, "more_body": not last})
                if last:
                    return
                data, last = await self._feed.next()
        finally:
            self._on_end()
