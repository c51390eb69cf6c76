"""The real loop, scheduler and KV cache over the fake engine, as a server's runtime on a thread of this process."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from headrace import wire
from headrace.config.llm_args import LlmArgs
from headrace.engine.fake import FakeEngine
from headrace.hub.source import ModelSource
from headrace.runtime.core import model_info, open_core
from headrace.runtime.links import ZmqLink
from headrace.seam import StepResult

SOURCE = ModelSource(kind="hf", path=Path("/nowhere"), name="fake")


class SlowEngine(FakeEngine):
    """Steps take a while."""

    step_s = 0.0

    def collect(self) -> StepResult:
        time.sleep(self.step_s)
        return super().collect()


class LoopProcess:
    """The shape of `RuntimeProcess`. `settings`: changes of LlmArgs."""

    def __init__(self, *, engine: FakeEngine, **settings: Any) -> None:
        self.returncode: int | None = None
        self.stderr_tail = ""
        self._engine = engine
        kv = {"tokens_per_block": engine.tokens_per_block, **settings.pop("kv_cache_config", {})}
        self._args = LlmArgs.model_validate({"model": "fake", "kv_cache_config": kv, **settings})
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-loop-")
        self.address = f"ipc://{Path(self._folder.name) / 'socket'}"
        self._thread = threading.Thread(target=self._run, name="loop-process", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(self.address)
        socket.send(wire.encode(wire.Shutdown()))
        self._thread.join(timeout_s)
        socket.close(0)
        context.term()
        self._folder.cleanup()
        self.returncode = 0

    def _run(self) -> None:
        link = ZmqLink(self.address)
        core = open_core(self._args, self._engine)
        with contextlib.closing(link), contextlib.closing(core):
            link.greet(wire.Ready(model_info(self._args, SOURCE, core, started_s=time.monotonic())))
            core.loop(self._args, link).run()
