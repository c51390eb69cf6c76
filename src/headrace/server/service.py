"""The state of the server: what it serves, whether it takes requests, and which are running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from headrace import wire
from headrace.front.errors import RequestError
from headrace.front.router import Router
from headrace.front.text_side import TextSide
from headrace.log import get
from headrace.server.errors import Unavailable
from headrace.server.feed import Feed
from headrace.server.job import Job
from headrace.server.link import RuntimeLink
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.pump import Batch, Pump

__all__ = ["Service", "ServiceOptions", "State"]

log = get("server")

State = Literal["loading", "ready", "draining", "failed"]

RETRY_LOADING_S = 5
ASK_TIMEOUT_S = 10.0
FRONT = 1
WORKER_NAME = "headrace-input"


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What the configuration says about serving."""

    model_name: str
    stream_interval: int = 1
    request_timeout_s: float | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    """Without a finished step for so long while requests run, the server isn't ready."""
    num_workers: int = 8
    """Threads that render templates and tokenise."""
    api_keys: tuple[str, ...] = ()
    cache_salt_from_api_key: bool = False
    """A prefix is shared by requests of one API key only; needs `api_keys`."""


@dataclass
class Counters:
    """Since the start."""

    accepted: int = 0
    rejected: int = 0
    disconnected: int = 0
    warned: set[str] = field(default_factory=set[str])
    """Unknown field names that have been logged."""


class Service:
    """Lives on the event loop. Only the router and the jobs are shared with the pump's thread."""

    def __init__(self, options: ServiceOptions, load_text: Callable[[], TextSide]) -> None:
        """`load_text` is called on a worker thread while the runtime loads."""
        self.options = options
        self.state: State = "loading"
        self.failure: wire.Failed | None = None
        self.router = Router(FRONT)
        self.counters = Counters()
        self._progress_s = time.monotonic()
        """When the runtime was last heard of, or began to have work."""
        self.jobs: set[Job] = set()
        self.workers = ThreadPoolExecutor(options.num_workers, thread_name_prefix=WORKER_NAME)
        self.changed = asyncio.Event()
        """Set whenever the state changes or a job ends; whoever waits clears it."""
        self._load_text = load_text
        self._kitchen: Kitchen | None = None
        self._info: asyncio.Future[wire.ModelInfo] | None = None
        self._link: RuntimeLink | None = None
        self._pump = Pump(self.router, deliver=self._deliver_soon, on_control=self._control_soon)
        self._settling: asyncio.Task[None] | None = None

    # ---- life --------------------------------------------------------------------------------

    def start(self, address: str) -> None:
        """Connect to the runtime, which may still be loading."""
        self._info = asyncio.get_running_loop().create_future()
        self._settling = asyncio.create_task(self._become_ready(self._info))
        self._pump.start()
        self._link = RuntimeLink(address, self._on_frame, front=FRONT, on_failure=self._link_failed)
        self._link.start()

    async def close(self) -> None:
        self._pump.close()
        if self._settling is not None:
            self._settling.cancel()
        if self._link is not None:
            await self._link.close()
        self.workers.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Take nothing new."""
        if self.state in ("loading", "ready"):
            self._set_state("draining")

    def fail(self, failure: wire.Failed) -> None:
        """The runtime is gone: every request ends with an error."""
        if self.failure is None:
            self.failure = failure
            self._set_state("failed")
            if self._link is not None:
                self._link.give_up()
            self.end_all(f"the engine has failed: {failure.message}", code="engine_failed")

    def end_all(self, message: str, *, code: str, status: int = 500) -> None:
        """End what is running with an error, as the last event of each stream."""
        for job in list(self.jobs):
            self._abort_ids(job)
            written = job.fail(message, status=status, code=code)
            self._deliver_one(job, written.data, written.error)

    def _set_state(self, state: State) -> None:
        self.state = state
        self.changed.set()

    @property
    def is_stalled(self) -> bool:
        """Requests run, and the engine has finished no step for `stall_timeout_s`."""
        silent_s = time.monotonic() - self._progress_s
        return self.state == "ready" and bool(self.jobs) and silent_s > self.options.stall_timeout_s

    # ---- requests ----------------------------------------------------------------------------

    def kitchen(self) -> Kitchen:
        """What prepares requests. Raises Unavailable while none can be taken."""
        if self.state == "draining":
            raise Unavailable("the server is shutting down", code="shutting_down")
        if self.state == "failed":
            raise Unavailable("the engine has failed and the server is ending", code="engine_failed")
        if self._kitchen is None:
            raise Unavailable("the model is loading", code="model_loading", retry_after_s=RETRY_LOADING_S)
        return self._kitchen

    def submit(self, prepared: Prepared) -> Job:
        """Accept a prepared request; from now on it ends in exactly one way.

        Raises:
            Unavailable: the server doesn't take requests (any more), or its queue is full.
        """
        self.kitchen()
        requests = prepared.requests
        self._require_room(len(requests), sum(len(request.prompt) for request in requests))
        frame = wire.encode(wire.Submit(requests))  # first: a request that can't travel leaves nothing behind
        job = Job(prepared.answer, Feed())
        for collector in prepared.collectors:
            job.add(collector)
            self.router.add(collector)
        if not self.jobs:
            self._progress_s = time.monotonic()
        self.jobs.add(job)
        self.counters.accepted += 1
        self._send_frame(frame)
        return job

    def info(self) -> wire.ModelInfo:
        """Of the model that is served. Raises Unavailable until it is there."""
        return self.kitchen().builder.info

    async def ask(self, question: wire.Question) -> wire.Answer:
        """Raises Unavailable: no engine, or no answer in time."""
        self.kitchen()
        assert self._link is not None
        answer = await self._link.ask(question, timeout_s=ASK_TIMEOUT_S)
        self.kitchen()
        if answer is None:
            raise Unavailable("the engine gave no answer in time", code="no_answer")
        return answer

    def abort(self, job: Job) -> None:
        """The client has gone: stop its work at once, queued or running."""
        if job not in self.jobs:
            return
        self.counters.disconnected += 1
        log.info("request %s: the client has disconnected", job.answer.id)
        self._abort_ids(job)
        job.ended = True
        self._deliver_one(job, b"", RequestError("the client has disconnected", status=499))

    def _abort_ids(self, job: Job) -> None:
        ids = [request_id for collector in job.collectors for request_id in self.router.remove(collector)]
        if ids:
            self._send(wire.Abort(ids))

    def _require_room(self, num_requests: int, num_tokens: int) -> None:
        limit = self.options.max_queued_requests
        if limit is not None and self.router.num_waiting + num_requests > limit:
            raise Unavailable(f"the queue is full ({limit} requests)", status=429, code="queue_full")
        limit = self.options.max_queued_tokens
        if limit is not None and self.router.num_waiting_tokens + num_tokens > limit:
            raise Unavailable(f"the queue is full ({limit} prompt tokens)", status=429, code="queue_full")

    def _send(self, message: wire.Up) -> None:
        self._send_frame(wire.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        if self._link is not None and self.state != "failed":
            self._link.send(frame)

    def _link_failed(self, error: BaseException) -> None:
        self.fail(wire.Failed(f"the link to the runtime broke: {type(error).__name__}: {error}"))

    def _on_frame(self, frame: bytes) -> None:
        self._progress_s = time.monotonic()
        self._pump.put(frame)

    # ---- from the pump -----------------------------------------------------------------------

    def _deliver_soon(self, batch: Batch, aborts: list[wire.Abort]) -> None:
        self._soon(lambda: self._deliver(batch, aborts))

    def _control_soon(self, message: wire.Down) -> None:
        self._soon(lambda: self._control(message))

    def _soon(self, call: Callable[[], None]) -> None:
        assert self._info is not None
        try:
            self._info.get_loop().call_soon_threadsafe(call)
        except RuntimeError:  # the loop has ended, and everybody with it
            log.debug("output after the end of the server")

    def _deliver(self, batch: Batch, aborts: list[wire.Abort]) -> None:
        for abort in aborts:
            self._send(abort)
        for job, written in batch:
            if written.last:
                self._deliver_one(job, written.data, written.error)
            else:
                job.feed.put(written.data, last=False)

    def _deliver_one(self, job: Job, data: bytes, error: RequestError | None) -> None:
        """A job's last piece."""
        if error is not None:
            job.feed.fail(error)
        else:
            job.feed.put(data, last=True)
        self.jobs.discard(job)
        self.changed.set()

    def _control(self, message: wire.Down) -> None:
        assert self._info is not None
        if isinstance(message, wire.Failed):
            self.fail(message)
        elif isinstance(message, wire.Ready) and not self._info.done():
            self._info.set_result(message.info)
        elif isinstance(message, wire.Answer):
            assert self._link is not None
            self._link.answered(message)

    async def _become_ready(self, info: asyncio.Future[wire.ModelInfo]) -> None:
        """Load the text side while the runtime loads; a fault of either ends the start."""
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(self.workers, self._load_text)
            self._kitchen = self._make_kitchen(text, await info)
        except Exception as error:
            message = str(error) or type(error).__name__
            self.fail(wire.Failed(message, bad_input=isinstance(error, ValueError)))
            return
        if self.state == "loading":
            self._set_state("ready")

    def _make_kitchen(self, text: TextSide, info: wire.ModelInfo) -> Kitchen:
        return Kitchen(
            model_name=self.options.model_name,
            tokenizer=text.tokenizer,
            template=text.template,
            builder=text.builder(info),
            allocate=self.router.allocate,
            stream_interval=self.options.stream_interval,
            timeout_s=self.options.request_timeout_s,
            salt_from_api_key=self.options.cache_salt_from_api_key,
        )
