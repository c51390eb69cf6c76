"""A submitted request as its caller holds it: a future, and an iterator over what arrives."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestFailed
from headrace.front.outputs import CompletionOutput, RequestPerfMetrics, TokenUsage, by_token

__all__ = ["RequestOutput"]


class Canceller(Protocol):
    """What an output needs of its front end."""

    @property
    def lock(self) -> threading.Lock: ...

    def cancel(self, collector: Collector) -> None: ...

    def join_logits(self, parts: list[Any]) -> Any: ...


class RequestOutput:
    """The result of one prompt. `result()`, `await aresult()`, `for` and `async for` advance it.

    Only these calls change the fields, in the caller's own thread; a step of an iteration that comes late holds
    everything that arrived since the step before. Without streaming there is one step, the finished output.
    """

    def __init__(self, front: Canceller, collector: Collector, *, prompt: str | None, streaming: bool) -> None:
        self.request_id = collector.request_ids[0]
        self.prompt = prompt
        self.prompt_token_ids = collector.prompt
        self.outputs: list[CompletionOutput] = [CompletionOutput(choice.index) for choice in collector.choices]
        del self.outputs[collector.params.n :]
        self.context_logits: Any = None
        self.finished = False
        self.error: str | None = None
        """What the runtime said, for a request that failed."""
        self.streaming = streaming
        self._front = front
        self._collector = collector
        self._aborted = False
        self._seen = 0  # news that an iteration has taken
        self._news = 0
        self._wakers: list[Callable[[], object]] = []
        self._on_done: list[Callable[[RequestOutput], None]] = []

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r},"
            f" prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, finished={self.finished})"
        )

    # ---- for the caller ----------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the request has ended, seen by the caller or not."""
        return self._collector.is_done

    @property
    def usage(self) -> TokenUsage:
        with self._front.lock:
            return self._collector.usage()

    @property
    def embedding(self) -> bytes:
        """float32 [hidden] as the engine pooled it, of a finished request for one."""
        return self._collector.embedding

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self._collector.cached_tokens

    @property
    def disaggregated_params(self) -> None:
        return None

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Raises:
            TimeoutError: not finished after `timeout` seconds; it goes on, and can be waited for again.
            RequestFailed: the request could not be finished.
        """
        self.wait(timeout)
        return self._raise_or_return()

    async def aresult(self) -> RequestOutput:
        """`result()` without blocking the event loop."""
        while not self.done:
            await self._wait_async(lambda: self.done)
        self._refresh()
        return self._raise_or_return()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, well or not; `error` tells. Raises TimeoutError."""
        if not self._wait(lambda: self.done, timeout):
            raise TimeoutError(f"request {self.request_id} has not finished after {timeout} s")
        self._refresh()

    def abort(self) -> None:
        """End it now: its choices finish as "cancelled" with what they have. Does nothing to a finished request."""
        if not self.done:
            self._aborted = True
            self._front.cancel(self._collector)

    def aborted(self) -> bool:
        return self._aborted

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self.finished:
            raise StopIteration
        self._wait(self._has_news, None)
        self._refresh()
        return self._raise_or_return()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        while not self._has_news():
            await self._wait_async(self._has_news)
        self._refresh()
        return self._raise_or_return()

    # ---- for the front end -------------------------------------------------------------------

    @property
    def collector(self) -> Collector:
        return self._collector

    def when_done(self, callback: Callable[[RequestOutput], None]) -> None:
        """Call it once, beside those given before, on the front end's thread, or now if the request has ended."""
        with self._front.lock:
            if not self.done:
                self._on_done.append(callback)
                return
        callback(self)

    def notify(self) -> None:
        """Something came; called without the lock."""
        with self._front.lock:
            done = self.done
            if not (done or self.streaming):
                return
            self._news += 1
            wakers, self._wakers = self._wakers, []
            callbacks, self._on_done = (self._on_done, []) if done else ([], self._on_done)
        for wake in wakers:
            wake()
        for callback in callbacks:
            callback(self)

    # ---- waiting -----------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return self.done or self._news > self._seen

    def _register(self, is_there: Callable[[], bool], wake: Callable[[], object]) -> bool:
        """Whether `wake` will be called; False when what is waited for is there already."""
        with self._front.lock:
            if is_there():
                return False
            self._wakers.append(wake)
            return True

    def _wait(self, is_there: Callable[[], bool], timeout: float | None) -> bool:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            event = threading.Event()
            if not self._register(is_there, event.set):
                return True
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if not event.wait(left_s):
                return is_there()

    async def _wait_async(self, is_there: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the waiter was cancelled and its loop has ended
                loop.call_soon_threadsafe(event.set)

        if self._register(is_there, wake):
            await event.wait()

    # ---- state -------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Take over what has arrived."""
        with self._front.lock:
            self._seen = self._news
            self.finished = self.done
            self.error = self._collector.error or None
            ranked = len(self._collector.choices) > len(self.outputs)
            if self.finished or not ranked:
                for choice, output in zip(self._collector.best() if self.finished else self._collector.choices,
                                          self.outputs):  # fmt: skip
                    self._update(choice, output)

    def _update(self, choice: Choice, output: CompletionOutput) -> None:
        params, collector = self._collector.params, self._collector
        output.text_start, output.token_start = len(output.text), len(output.token_ids)
        output.text = choice.text
        output.token_ids += choice.token_ids[output.token_start :]
        if params.logprobs is not None:
            new = choice.logprobs[output.token_start :]
            added: list[Any] = [entry.values[0] for entry in new] if params.logprobs_simple_format else by_token(new)
            output.logprobs.extend(added)
            output.cumulative_logprob = choice.cumulative_logprob
        elif params.use_beam_search or collector.params.num_sequences > params.n:
            output.cumulative_logprob = choice.cumulative_logprob
        if collector.prompt_logprobs is not None and not output.prompt_logprobs:
            entries = collector.prompt_logprobs
            simple = params.prompt_logprobs_simple_format
            output.prompt_logprobs = [e.values[0] if e else None for e in entries] if simple else by_token(entries)
        output.finish_reason, output.stop_reason = choice.finish, choice.stop_reason
        if choice.logits and choice.finish is not None:
            output.generation_logits = self._front.join_logits(choice.logits)
        if choice.times is not None and params.return_perf_metrics:
            output.request_perf_metrics = RequestPerfMetrics(choice.times, collector.cached_tokens)

    def _raise_or_return(self) -> RequestOutput:
        if self.error is not None:
            raise RequestFailed(f"request {self.request_id} failed: {self.error}", outputs=[self])
        return self
