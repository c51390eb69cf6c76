"""The server's end of the socket to the runtime."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq
import zmq.asyncio

from headrace import wire

__all__ = ["RuntimeLink"]


class RuntimeLink:
    """A DEALER socket on the event loop. Frames are handed on undecoded, in order."""

    def __init__(
        self,
        address: str,
        on_frame: Callable[[bytes], None],
        *,
        front: int = 1,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` is told when the link can't go on; without it, requests would wait for ever."""
        self.front = front
        self._address = address
        self._on_frame = on_frame
        self._on_failure = on_failure
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 100
        self._socket.set_hwm(0)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._asked: deque[asyncio.Future[wire.Answer | None]] = deque()
        """The runtime answers in order."""

    def start(self) -> None:
        """Connect; the runtime need not be there yet."""
        self._socket.connect(self._address)
        self.send(wire.encode(wire.Hello(front=self.front)))
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def send(self, frame: bytes) -> None:
        """From the event loop's thread; order is kept. The caller encodes: a value that can't travel is its concern."""
        self._outbox.put_nowait(frame)

    async def ask(self, question: wire.Question, *, timeout_s: float | None) -> wire.Answer | None:
        """None: no answer in time (a `timeout_s` of None waits as long as it takes), or nobody to give one any more."""
        future: asyncio.Future[wire.Answer | None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self.send(wire.encode(question))
        await asyncio.wait({future}, timeout=timeout_s)
        if not future.done():
            future.set_result(None)  # it keeps its place, for the answer that may still come
        return future.result()

    def answered(self, answer: wire.Answer) -> None:
        """Whoever gets the frames tells of the answers among them, in order."""
        future = self._asked.popleft()
        if not future.done():
            future.set_result(answer)

    def give_up(self) -> None:
        """There won't be any answer."""
        for future in self._asked:
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _receive(self) -> None:
        while True:
            self._on_frame(await self._socket.recv())

    async def _send(self) -> None:
        while True:
            await self._socket.send(await self._outbox.get())

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure(error)
