"""Links between the loop and its front ends: a queue inside one process, ZeroMQ across processes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from headrace import wire
from headrace.scheduler.scheduler import Outbox


class QueueLink:
    """One front end in the same process; outputs are handed to a callback on the loop's thread."""

    def __init__(self, on_message: Callable[[wire.Down], None]) -> None:
        self._inbox: queue.SimpleQueue[wire.Up] = queue.SimpleQueue()
        self._on_message = on_message

    def put(self, message: wire.Up) -> None:
        """From any thread."""
        self._inbox.put(message)

    def receive(self, wait_s: float) -> Sequence[wire.Up]:
        messages: list[wire.Up] = []
        try:
            if wait_s > 0:
                messages.append(self._inbox.get(timeout=wait_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, outbox: Outbox, step: int) -> None:
        self._on_message(wire.Outputs(step, outbox.ids.tobytes(), outbox.tokens.tobytes(), outbox.deltas))

    def reply(self, message: wire.Down) -> None:
        self._on_message(message)


class ZmqLink:
    """Front ends in other processes, over a ROUTER socket on a Unix path. Used by one thread.

    A front end that has gone is found out when something is sent to it: its requests are aborted by
    the caller of `take_lost`.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._identity: dict[int, bytes] = {}
        self._last: bytes = b""
        self._greeting: bytes | None = None

    @property
    def has_fronts(self) -> bool:
        """Whether a front end has said Hello."""
        return bool(self._identity)

    def greet(self, message: wire.Down) -> None:
        """What every front end is told, those that have said Hello and those to come."""
        self._greeting = wire.encode(message)
        for identity in self._identity.values():
            self._send(identity, self._greeting)

    def receive(self, wait_s: float) -> Sequence[wire.Up]:
        messages: list[wire.Up] = []
        if not self._socket.poll(int(wait_s * 1000)):
            return messages
        while True:
            try:
                identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = wire.decode_up(data)
            self._last = identity
            if isinstance(message, wire.Hello):
                self._identity[message.front] = identity
                if self._greeting is not None:
                    self._send(identity, self._greeting)
            messages.append(message)
            if isinstance(message, wire.Question):
                return messages  # `reply` answers the last message's sender

    def send(self, outbox: Outbox, step: int) -> None:
        fronts = {wire.front_of(delta.id) for delta in outbox.deltas}
        owners = outbox.ids >> wire.FRONT_SHIFT
        fronts.update(np.unique(owners).tolist())
        if not outbox:  # a sign of life, for all
            fronts.update(self._identity)
        for front in fronts:
            mine = owners == front
            message = wire.Outputs(
                step,
                outbox.ids[mine].tobytes(),
                outbox.tokens[mine].tobytes(),
                [delta for delta in outbox.deltas if wire.front_of(delta.id) == front],
            )
            identity = self._identity.get(front)
            if identity is not None:
                self._send(identity, wire.encode(message))

    def reply(self, message: wire.Down) -> None:
        self._send(self._last, wire.encode(message))

    def _send(self, identity: bytes, data: bytes) -> None:
        # A front end that has gone is no error: its process's end ends ours, or its requests time out.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart((identity, data), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
