"""Signs of life: a process touches a file of its own, and whoever waits for it looks whether it still does.

A thread of its own does it, so a process that computes, or waits for others, shows them; one that is stopped, or stuck
while it holds the interpreter, doesn't. Waiting is counted in the watcher's own turns and never by the clock: where all
processes are frozen together, and go on later, nobody has missed anything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PERIOD_S", "PulseWatch", "start_pulse"]

PERIOD_S = 0.5


def start_pulse(path: Path) -> None:
    """In the process that is watched, until it ends or the file's folder is gone."""

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                path.touch()
                time.sleep(PERIOD_S)

    threading.Thread(target=beat, name="headrace-pulse", daemon=True).start()


class PulseWatch:
    """One time of waiting for several processes. One whose file isn't there yet is only starting."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._times: list[float | None] = [None] * len(paths)
        self._silent_s = [0.0] * len(paths)

    def look(self, waited_s: float) -> None:
        """After `waited_s` more of waiting."""
        for index, path in enumerate(self._paths):
            try:
                touched_s = path.stat().st_mtime
            except OSError:
                touched_s = None
            is_silent = touched_s is not None and touched_s == self._times[index]
            self._silent_s[index] = self._silent_s[index] + waited_s if is_silent else 0.0
            self._times[index] = touched_s

    def silent(self, limit_s: float) -> list[int]:
        """Numbers of those that have shown nothing for so long."""
        return [index for index, silent_s in enumerate(self._silent_s) if silent_s >= limit_s]
