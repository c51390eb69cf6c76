"""Threads for what may take long: jobs go in by id, what came of them is asked for without waiting."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger("headrace.engine")

CLOSE_TIMEOUT_S = 2.0

Job = Callable[[], bool]
"""Says whether it worked."""


class Workers:
    """Up to `count` threads, started with the first job. Used by one thread."""

    def __init__(self, count: int, *, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, job_id: int, job: Job) -> None:
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put((job_id, job))

    def take_done(self) -> list[tuple[int, bool]]:
        """(id, whether it worked) of jobs that have ended since the last call."""
        done: list[tuple[int, bool]] = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> bool:
        """Drop what has not begun and wait a moment for the rest. -> whether no job runs any more"""
        while not self._jobs.empty():
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job_id, job = item
            try:
                worked = job()
            except Exception:  # the others go on
                log.exception("transfer %d failed", job_id)
                worked = False
            self._done.put((job_id, worked))
