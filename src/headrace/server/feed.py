"""Between the thread that makes answers and the coroutine that writes them to the socket."""

from __future__ import annotations

import asyncio

from headrace.front.errors import RequestError

__all__ = ["Feed"]


class Feed:
    """Pieces of one response, in order. Used on the event loop only, by one reader."""

    __slots__ = ("_chunks", "_waiter", "closed", "error")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False
        self.error: RequestError | None = None
        """Why there is no answer; only when nothing of one has been put."""

    def put(self, data: bytes, *, last: bool) -> None:
        """Add a piece; after the last one nothing is taken any more."""
        if self.closed:
            return
        if data:
            self._chunks.append(data)
        self.closed = last
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End without an answer."""
        if not self.closed:
            self.error = error
            self.closed = True
            self._wake()

    async def next(self) -> tuple[bytes, bool]:
        """All that has come since the last call, waiting for something; and whether it was the last."""
        while not (self._chunks or self.closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        return data, self.closed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
