"""How long the device works on a step."""

from __future__ import annotations

import time

import torch


class StepClock:
    """From when the device comes to the step until it has ended it; on a CPU from this object's making on."""

    def __init__(self, device: torch.device, *, before: StepClock | None = None) -> None:
        """Args: before: of the step before."""
        self._ended = None if before is None or before._events is None else before._events[1]
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._begin_s = time.perf_counter()
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()

    def stop(self) -> None:
        """All of the step is queued."""
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Waits for the step."""
        if self._events is None:
            return time.perf_counter() - self._begin_s
        begin, end = self._events
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def idle_seconds(self) -> float:
        """Between the step before and this one, of which `seconds` was asked."""
        if self._events is None or self._ended is None:
            return 0.0
        return max(0.0, self._ended.elapsed_time(self._events[0])) / 1000
