"""Traces of the engine: torch's profiler around steps, written as Chrome traces (chrome://tracing, Perfetto)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.seam import Command

__all__ = ["COMMANDS", "Profiling"]

log = logging.getLogger("headrace.engine")

COMMANDS = ("start_profile", "stop_profile")


class Profiling:
    """One rank's. Everything happens on the thread that runs steps: it is whose work the profiler sees."""

    def __init__(self, folder: str | None, *, rank: int, device: torch.device) -> None:
        self._folder = None if folder is None else Path(folder)
        self._rank = rank
        self._device = device
        self._wanted: Command | None = None
        """The trace that is under way, or waits for its first step."""
        self._profile: profile | None = None
        self._num_steps = 0
        """That have begun since it was asked for."""

    def run(self, command: Command) -> dict[str, Any]:
        """-> `message` and `files`, or `error`: why nothing was done"""
        if command.name == "start_profile":
            return self._start(command)
        if self._wanted is None:
            return {"error": "no trace is being made: start one first"}
        return self._finish()

    def step(self) -> None:
        """A step begins."""
        if self._wanted is None:
            return
        args = self._wanted.args
        if self._profile is None and self._num_steps >= args["start_step"]:
            self._profile = profile(activities=self._activities(args["activities"]), record_shapes=True)
            self._profile.start()
        elif args["num_steps"] and self._num_steps >= args["start_step"] + args["num_steps"]:
            self._finish()
        self._num_steps += 1

    def _start(self, command: Command) -> dict[str, Any]:
        if self._folder is None:
            return {"error": "profiling is off: start with profile_dir"}
        if self._wanted is not None:
            return {"error": "a trace is being made already: stop it first"}
        self._wanted, self._num_steps = command, 0
        return {"message": "tracing begins with the next step", "files": [self._file(command).name]}

    def _finish(self) -> dict[str, Any]:
        assert self._wanted is not None
        file, running = self._file(self._wanted), self._profile
        self._wanted = self._profile = None
        if running is None:
            return {"message": "no step came: there is no trace", "files": []}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        running.stop()
        running.export_chrome_trace(str(file))
        if not file.exists():  # the profiler says so on standard error, and nothing to us
            return {"error": f"{file} could not be written: see the server's output"}
        log.info("trace written to %s", file)
        return {"message": "the trace is written", "files": [file.name]}

    def _file(self, command: Command) -> Path:
        assert self._folder is not None
        return self._folder / f"headrace-trace-{command.args['label']}-rank-{self._rank}.json"

    def _activities(self, wanted: list[str]) -> list[ProfilerActivity]:
        kinds = [ProfilerActivity.CPU] if not wanted or "CPU" in wanted else []
        if self._device.type == "cuda" and (not wanted or "GPU" in wanted):
            kinds.append(ProfilerActivity.CUDA)
        return kinds or [ProfilerActivity.CPU]
