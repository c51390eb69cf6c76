"""A front end on threads: requests go up a link, its messages become finished outputs."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from headrace import wire
from headrace.front.collector import Collector
from headrace.front.errors import RuntimeFailure
from headrace.front.request_output import RequestOutput
from headrace.front.router import Router
from headrace.front.tracing import NO_TRACES, Tracer
from headrace.log import get
from headrace.params import SamplingParams
from headrace.text.tokenizer import Tokenizer
from headrace.types import PinInfo, Request

__all__ = ["Client", "Link", "OpenLink"]

log = get("front")

JOIN_TIMEOUT_S = 4.0

_Answer = TypeVar("_Answer", wire.Stats, wire.KvEvents, wire.Pins, wire.Profiled)


class Link(Protocol):
    """The way to a runtime. Messages from it come by the callback it was made with, on any one thread."""

    def start(self) -> None:
        """Return at once; Ready or Failed arrives as a message."""
        ...

    def send(self, message: wire.Up) -> None: ...

    def close(self) -> None: ...


OpenLink = Callable[[Callable[[wire.Down], None]], Link]


class Client:
    """Owns a link and the thread that turns its messages into text, away from the runtime's own thread."""

    def __init__(
        self, open_link: OpenLink, *, join_logits: Callable[[list[Any]], Any] = list, tracer: Tracer = NO_TRACES
    ) -> None:
        self.router = Router()
        self.tracer = tracer
        self._join_logits = join_logits
        self.info: wire.ModelInfo | None = None
        self.failure: RuntimeFailure | None = None
        self._settled = threading.Event()  # info or failure is there
        self._inbox: queue.SimpleQueue[wire.Down | None] = queue.SimpleQueue()
        self._answers: dict[type[wire.Answer], queue.SimpleQueue[wire.Answer | None]] = {
            kind: queue.SimpleQueue() for kind in (wire.Stats, wire.KvEvents, wire.Pins, wire.Profiled)
        }
        """None: there won't be any more. What comes too late for a caller is there for the next one."""
        self._asking = threading.Lock()
        self._calls = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()
        self._link = open_link(self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="headrace-front", daemon=True)

    @property
    def lock(self) -> threading.Lock:
        return self.router.lock

    def join_logits(self, parts: list[Any]) -> Any:
        """Logits of one output, in one piece."""
        return self._join_logits(parts)

    def start(self) -> None:
        self._thread.start()
        self._link.start()

    def wait_ready(self, *, poll_s: float = 0.2) -> wire.ModelInfo:
        """Wait for the model. Ctrl-C gets through.

        Raises:
            RuntimeFailure: it could not be loaded.
        """
        while not self._settled.wait(poll_s):
            pass
        if self.failure is not None:
            raise self.failure
        assert self.info is not None
        return self.info

    # ---- requests ----------------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        prompt: str | None = None,
        streaming: bool = False,
    ) -> RequestOutput:
        """Send what `RequestBuilder.build` gave for one prompt."""
        return self.submit_many([(requests, params, prompt)], tokenizer=tokenizer, streaming=streaming)[0]

    def submit_many(
        self,
        prompts: Sequence[tuple[Sequence[Request], SamplingParams, str | None]],
        *,
        tokenizer: Tokenizer | None,
        streaming: bool = False,
    ) -> list[RequestOutput]:
        """Send several prompts as one message, so that they are scheduled together.

        Raises:
            RuntimeFailure: the runtime has ended.
        """
        self._require_open()
        outputs: list[RequestOutput] = []
        together: list[Request] = []
        for requests, params, text in prompts:
            collector = Collector(requests, params, tokenizer=tokenizer, streaming=streaming)
            output = RequestOutput(self, collector, prompt=text, streaming=streaming)
            collector.owner = output
            self.router.add(collector)
            outputs.append(output)
            together += requests
        self._link.send(wire.Submit(together))
        if self.failure is not None:  # it ended while they were being added
            self._fail_all(self.failure.message)
        return outputs

    def cancel(self, collector: Collector) -> None:
        """End a request from this side, now."""
        with self.lock:
            ids = self.router.remove(collector)
            collector.cancel()
        if ids and not self._closed:
            self._link.send(wire.Abort(ids))
        self._notify(collector)

    def stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Statistics of the steps since the last call. Raises as `_ask` does."""
        return self._ask(wire.GetStats(), wire.Stats, timeout_s).iterations

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Events of the KV cache since the last call. Raises as `_ask` does."""
        return self._ask(wire.GetKvEvents(), wire.KvEvents, timeout_s).events

    def pins(self, timeout_s: float) -> list[PinInfo]:
        """The pinned prompts. Raises as `_ask` does."""
        return self._ask(wire.GetPins(next(self._calls)), wire.Pins, timeout_s).pins

    def unpin(self, name: str, timeout_s: float) -> bool:
        """Give a pin up; False: there is none of that name. Raises as `_ask` does."""
        return self._ask(wire.Unpin(next(self._calls), name), wire.Pins, timeout_s).found

    def profile(self, wanted: wire.Profile, timeout_s: float) -> list[str]:
        """Begin or end a trace. -> names of its files. Raises as `_ask` does, and ValueError: why nothing was done."""
        if unknown := set(wanted.activities) - {"CPU", "GPU"}:
            raise ValueError(f"activities: must be of CPU and GPU, got {min(unknown)!r}")
        answer = self._ask(wanted, wire.Profiled, timeout_s)
        if answer.error:
            raise ValueError(answer.error)
        return answer.files

    def _ask(self, question: wire.Question, kind: type[_Answer], timeout_s: float) -> _Answer:
        """What the runtime answers, between two steps.

        Raises:
            TimeoutError: it didn't answer.
            RuntimeFailure: it has ended.
        """
        call = question.call if isinstance(question, wire.GetPins | wire.Unpin) else 0
        answers = self._answers[kind]
        with self._asking:
            self._require_open()
            self._link.send(question)
            deadline_s = time.monotonic() + timeout_s
            while True:
                try:
                    answer = answers.get(timeout=max(deadline_s - time.monotonic(), 0))
                except queue.Empty:
                    raise TimeoutError(f"the runtime gave no answer within {timeout_s} s") from None
                if answer is None:
                    self._require_open()
                elif not isinstance(answer, wire.Pins) or answer.call == call:
                    return cast("_Answer", answer)

    def close(self) -> None:
        """End the runtime and whatever still runs. Takes under 5 s; safe to call twice."""
        if self._closed or os.getpid() != self._pid:  # a forked child must not end its parent's engine
            return
        self._closed = True
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        self._link.close()
        self._inbox.put(None)
        for answers in self._answers.values():
            answers.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(deadline - time.monotonic(), 0.1))
        self._fail_all("the engine was shut down")
        self.tracer.close()

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                self._handle(message)
            except Exception as error:  # a fault of this side must not leave callers waiting
                log.exception("front end failed")
                self._fail(wire.Failed(f"{type(error).__name__}: {error}"))

    def _handle(self, message: wire.Down) -> None:
        if isinstance(message, wire.Outputs):
            done = self.router.dispatch(message)
            for abort in done.aborts:
                self._link.send(abort)
            for collector in done.touched:
                self._notify(collector)
        elif isinstance(message, wire.Ready):
            self.info = message.info
            self._settled.set()
        elif isinstance(message, wire.Failed):
            self._fail(message)
        else:
            self._answers[type(message)].put(message)

    def _fail(self, message: wire.Failed) -> None:
        if message.traceback:
            log.debug("%s", message.traceback)
        self.failure = RuntimeFailure(message.message, traceback=message.traceback, bad_input=message.bad_input)
        self._settled.set()
        for answers in self._answers.values():
            answers.put(None)
        self._fail_all(message.message)

    def _fail_all(self, message: str) -> None:
        for collector in self.router.fail_all(message):
            self._notify(collector)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeFailure("the engine stayed in the parent when this process was forked: make a new LLM here")
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise RuntimeFailure("the engine was shut down: make a new LLM")

    @staticmethod
    def _notify(collector: Collector) -> None:
        assert isinstance(collector.owner, RequestOutput)
        collector.owner.notify()
