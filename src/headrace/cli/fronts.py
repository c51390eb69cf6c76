"""Further server processes beside the first one: they share its port and its runtime."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from headrace.config.llm_args import LlmArgs
from headrace.config.serving import ServerOptions
from headrace.config.show import plain
from headrace.front.socket_link import ChildRuntime
from headrace.hub.source import ModelSource
from headrace.runtime.children import end_children, start_child
from headrace.runtime.packing import pack_args, pack_source
from headrace.runtime.pulse import PERIOD_S, PulseWatch

MODULE = "headrace.cli.front_process"
KILL_TIMEOUT_S = 2.0
LEAST_PATIENCE_S = 5.0
"""With a process that gives no sign of life; a busy one may be late."""


def num_fronts(args: LlmArgs) -> int:
    """Processes of the API. Each turns its requests' ids into text, so more text workers are more of them."""
    return max(args.num_serve_frontends, args.num_postprocess_workers)


class FrontOrder(msgspec.Struct):
    """What a front process is told on its standard input: a line of JSON."""

    args: dict[str, object]
    source: dict[str, str | None]
    options: dict[str, object]
    address: str
    """Of the runtime."""
    descriptor: int
    """Of the socket that listens."""
    front: int
    version: str
    pulse: str
    """The file that it touches as long as it lives."""


class RuntimeEnd(msgspec.Struct):
    """A later line: the runtime has ended."""

    returncode: int
    stderr_tail: str


class FrontProcesses:
    """Implements `run.Fronts`. They end with this process: their standard input is its pipe."""

    def __init__(self, args: LlmArgs, source: ModelSource, options: ServerOptions, *, version: str) -> None:
        self._args = args
        self._source = source
        self._options = options
        self._version = version
        self._children: list[subprocess.Popen[bytes]] = []
        self._patience_s = max(args.stall_timeout_s, LEAST_PATIENCE_S)
        self._watch = PulseWatch([])
        self._looked_s = 0.0

    def start(self, runtime: ChildRuntime, listener: socket.socket) -> None:
        folder = Path(runtime.address.removeprefix("ipc://")).parent
        pulses = {front: folder / f"front-{front}" for front in range(2, num_fronts(self._args) + 1)}
        self._watch = PulseWatch(list(pulses.values()))
        self._looked_s = time.monotonic()
        for front, pulse in pulses.items():
            order = FrontOrder(
                args=pack_args(self._args),
                source=pack_source(self._source),
                options=revealed(self._options),
                address=runtime.address,
                descriptor=listener.fileno(),
                front=front,
                version=self._version,
                pulse=str(pulse),
            )
            self._children.append(start_child(MODULE, msgspec.json.encode(order), descriptors=[listener.fileno()]))

    @property
    def cause_of_death(self) -> str:
        """One line on a process that has ended though nobody told it to, or hangs; "" while all live."""
        for front, child in enumerate(self._children, 2):
            code = child.poll()
            if code is not None:
                end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"server process {front} {end}"
        now_s = time.monotonic()
        if now_s - self._looked_s >= PERIOD_S:
            self._looked_s = now_s
            self._watch.look(PERIOD_S)
        for index in self._watch.silent(self._patience_s):
            why = f"has given no sign of life for {self._patience_s:g} s: it is stopped or hangs"
            return f"server process {index + 2} {why}"
        return ""

    def signal(self, number: signal.Signals) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def tell_end(self, runtime: ChildRuntime) -> None:
        """The runtime is gone: each ends its requests with an error, and itself."""
        line = msgspec.json.encode(RuntimeEnd(runtime.returncode or 0, runtime.stderr_tail)) + b"\n"
        for child in self._children:
            assert child.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                child.stdin.write(line)
                child.stdin.flush()

    def close(self, timeout_s: float) -> None:
        """Wait for them to end by themselves, then end them; safe to call twice."""
        deadline_s = time.monotonic() + timeout_s
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline_s - time.monotonic(), 0.05))
        end_children(self._children, timeout_s=KILL_TIMEOUT_S)


def revealed(options: ServerOptions) -> dict[str, Any]:
    """As values that `ServerOptions.model_validate` takes, secrets included: for a pipe, never for a log."""
    return {name: _reveal(value) for name, value in options.__dict__.items() if name in options.model_fields_set}


def _reveal(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, (list, tuple)):
        return [_reveal(item) for item in value]
    return plain(value)
