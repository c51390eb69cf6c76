"""A link to a runtime in another process, for front ends without an event loop."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from headrace import wire
from headrace.log import get

__all__ = ["ChildRuntime", "SocketLink"]

log = get("front")

POLL_MS = 200
CLOSE_TIMEOUT_S = 4.0


class ChildRuntime(Protocol):
    """What `RuntimeProcess` offers."""

    @property
    def address(self) -> str: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stderr_tail(self) -> str: ...

    def start(self) -> None: ...

    def close(self, timeout_s: float) -> None: ...


class SocketLink:
    """Starts the process, speaks with it on one thread of its own, and reports its death as a Failed message."""

    def __init__(self, runtime: ChildRuntime, on_message: Callable[[wire.Down], None], *, front: int = 0) -> None:
        self._runtime = runtime
        self._on_message = on_message
        self._front = front
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._wake_address = f"inproc://wake-{id(self)}"
        self._closing = threading.Event()
        self._wake_lock = threading.Lock()
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.bind(self._wake_address)
        self._thread = threading.Thread(target=self._run, name="headrace-link", daemon=True)

    def start(self) -> None:
        self._runtime.start()
        self._thread.start()
        self.send(wire.Hello(front=self._front))

    def send(self, message: wire.Up) -> None:
        self._outbox.put(wire.encode(message))  # here: a value that can't travel is its sender's error
        self._wake()

    def close(self) -> None:
        """Ask the runtime to end, then see to it that it has."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        if self._thread.is_alive():
            self.send(wire.Shutdown())
            self._closing.set()
            self._wake()
            self._thread.join(1.0)
        self._runtime.close(max(deadline_s - time.monotonic(), 0.5))

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._waker.closed:
                self._waker.send(b"")

    def _run(self) -> None:
        sleeper = self._context.socket(zmq.PAIR)
        sleeper.connect(self._wake_address)
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 500
        socket.set_hwm(0)
        socket.connect(self._runtime.address)
        poller = zmq.Poller()
        poller.register(sleeper, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        try:
            while not (self._closing.is_set() and self._outbox.empty()):
                ready = dict(poller.poll(POLL_MS))
                if sleeper in ready:
                    sleeper.recv()
                while not self._outbox.empty():
                    socket.send(self._outbox.get())
                if socket in ready:
                    self._on_message(wire.decode_down(socket.recv()))
                elif self._runtime.returncode is not None and not self._closing.is_set():
                    self._on_message(wire.Failed(cause_of_death(self._runtime)))
                    return
        except Exception as error:  # the callers must not wait for ever
            log.exception("the link to the runtime broke")
            self._on_message(wire.Failed(f"{type(error).__name__} in the link to the runtime: {error}"))
        finally:
            socket.close()
            sleeper.close()
            with self._wake_lock:
                self._waker.close()


def cause_of_death(runtime: ChildRuntime) -> str:
    """One line on why a runtime that said nothing is gone."""
    code = runtime.returncode
    end = f"ended with exit code {code}"
    if code is not None and code < 0:
        hint = " (no memory left?)" if code == -signal.SIGKILL else ""
        end = f"was killed by signal {-code}{hint}"
    errors = [line.strip() for line in runtime.stderr_tail.splitlines() if "error" in line.lower()]
    return f"the runtime process {end}" + (f": {errors[-1]}" if errors else "")
