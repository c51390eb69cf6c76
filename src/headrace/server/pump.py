"""The thread that turns the runtime's frames into bytes for clients: decode, detokenise, write, hand over."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from headrace import wire
from headrace.front.router import Router
from headrace.log import get
from headrace.server.job import Job, Written

__all__ = ["Batch", "Pump"]

log = get("server")

Batch = list[tuple[Job, Written]]
"""What one frame brought, for the event loop to deliver at once."""


class Pump:
    """All text is made here, so that the event loop only copies bytes, and one frame costs it one wake-up."""

    def __init__(
        self,
        router: Router,
        *,
        deliver: Callable[[Batch, list[wire.Abort]], None],
        on_control: Callable[[wire.Down], None],
    ) -> None:
        """Both callbacks are called on the pump's thread."""
        self._router = router
        self._deliver = deliver
        self._on_control = on_control
        self.progress_s = 0.0
        """time.monotonic() when the runtime last told of a step, or got something to do. An answer to a question is no
        sign of one."""
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, frame: bytes) -> None:
        self._frames.put(frame)

    def close(self) -> None:
        self._frames.put(None)
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                message = wire.decode_down(frame)
                if isinstance(message, wire.Outputs):
                    self.progress_s = time.monotonic()
                    self._handle(message)
                else:
                    self._on_control(message)
            except Exception as error:
                log.exception("the runtime's message could not be handled")
                self._on_control(wire.Failed(f"{type(error).__name__} in the server: {error}"))

    def _handle(self, outputs: wire.Outputs) -> None:
        done = self._router.dispatch(outputs)
        batch: Batch = []
        orphans: list[int] = []
        for collector in done.touched:
            job = collector.owner
            assert isinstance(job, Job)
            written = job.write(collector)
            if written.data or written.last:
                batch.append((job, written))
            if written.last:
                for other in job.collectors:
                    orphans += self._router.remove(other)
        aborts = [*done.aborts, wire.Abort(orphans)] if orphans else done.aborts
        if batch or aborts:
            self._deliver(batch, aborts)
