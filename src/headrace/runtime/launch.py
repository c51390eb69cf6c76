"""Starting a runtime from a front end: on threads of this process, or as a child process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from headrace import wire
from headrace.config.llm_args import LlmArgs
from headrace.hub.source import ModelSource
from headrace.runtime.children import end_children, start_child
from headrace.runtime.packing import pack_args, pack_source
from headrace.seam import EnginePort

CLOSE_TIMEOUT_S = 4.0


class LocalRuntime:
    """Loop and engine on background threads of the caller's process."""

    def __init__(
        self,
        args: LlmArgs,
        source: ModelSource,
        on_message: Callable[[wire.Down], None],
        *,
        make_engine: Callable[[LlmArgs, ModelSource], EnginePort] | None = None,
    ) -> None:
        """
        Args:
            on_message: called on the runtime's thread; Ready or Failed comes first.
            make_engine: another engine behind the port (a fake, for tests).
        """
        from headrace.runtime.links import QueueLink

        self._args = args
        self._source = source
        self._link = QueueLink(on_message)
        self._make_engine = make_engine
        self._thread = threading.Thread(target=self._run, name="headrace-runtime", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: wire.Up) -> None:
        self._link.put(message)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the loop after the step in hand; safe to call twice."""
        if self._thread.is_alive():
            self._link.put(wire.Shutdown())
            self._thread.join(timeout_s)

    def _run(self) -> None:
        from headrace.runtime.core import model_info, open_core
        from headrace.runtime.engines import make_engine
        from headrace.runtime.failure import failed

        started_s = time.monotonic()
        try:
            engine = (self._make_engine or make_engine)(self._args, self._source)
            core = open_core(self._args, engine)
            try:
                self._link.reply(wire.Ready(model_info(self._args, self._source, core, started_s=started_s)))
                core.loop(self._args, self._link).run()
            finally:
                core.close()
        except BaseException as error:  # the front end is told; there is nobody else on this thread
            self._link.reply(failed(error))


class RuntimeProcess:
    """The runtime as a child. `address` is a ZeroMQ endpoint on a Unix path that only this user can reach."""

    def __init__(self, args: LlmArgs, source: ModelSource, *, log_level: str = "info") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        self.address = f"ipc://{self._folder.name}/runtime"
        self._order = Order(pack_args(args), pack_source(source), self.address, log_level)
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=50)
        self._forwarder: threading.Thread | None = None

    def start(self) -> None:
        self._process = start_child("headrace.runtime.process", msgspec.json.encode(self._order), capture_stderr=True)
        self._forwarder = threading.Thread(target=self._forward, name="headrace-runtime-stderr", daemon=True)
        self._forwarder.start()

    def _forward(self) -> None:
        """The child's standard error is ours; its last lines are kept for the root cause."""
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace")
            self._tail.append(text.rstrip("\n"))
            sys.stderr.write(text)
            sys.stderr.flush()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """None while it runs or has not started."""
        return self._process.poll() if self._process else None

    @property
    def stderr_tail(self) -> str:
        return "\n".join(self._tail)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """No process is left afterwards; safe to call twice."""
        if self._process is not None:
            end_children([self._process], timeout_s=timeout_s)
        self._folder.cleanup()


class Order(msgspec.Struct):
    """The same fields as `process.RuntimeOrder`, which this process need not import."""

    args: dict[str, object]
    source: dict[str, str | None]
    address: str
    log_level: str
