"""The state of the server: what it serves, whether it takes requests, and which are running."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace import wire
from headrace.front.errors import RequestError
from headrace.front.router import Router
from headrace.front.text_side import TextSide
from headrace.front.tracing import NO_TRACE, NO_TRACES, Trace, Tracer
from headrace.log import get
from headrace.server.counters import Counters
from headrace.server.errors import Unavailable
from headrace.server.feed import Feed
from headrace.server.job import Job
from headrace.server.link import RuntimeLink
from headrace.server.meter import LEFT, Meter
from headrace.server.metrics import Metrics
from headrace.server.parsing import choose_parsing
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.pump import Batch, Pump
from headrace.server.replies import GONE_STATUS
from headrace.server.rules import RequestRules
from headrace.server.stall import StallWatch

__all__ = ["Apis", "Operations", "Service", "ServiceOptions", "State"]

log = get("server")

State = Literal["loading", "ready", "draining", "failed"]

RETRY_LOADING_S = 5
ASK_TIMEOUT_S = 10.0
MAX_RETRY_S = 60
WORKER_NAME = "headrace-input"


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What operators choose beside the limits."""

    front: int = 1
    """Number of this server process; its requests' ids begin with it."""
    num_fronts: int = 1
    """Server processes that share the port. What one of them keeps in memory, the others don't have."""
    metrics_open: bool = False
    """Metrics may be read without a key."""
    strict_fields: bool = False
    """An unknown field of a body is an error instead of a warning."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call; "*" is any."""
    middleware: tuple[Any, ...] = ()
    """ASGI middleware classes, the first one outermost."""
    buckets: dict[str, Any] = field(default_factory=dict[str, Any])
    """`prometheus_metrics_config`."""
    can_profile: bool = False
    page: bool = True
    """The page for people is at /."""
    show_cached_text: bool = False
    """The map of the cache has the texts of prefixes that the asker itself could use."""
    tracer: Tracer = NO_TRACES
    shown: dict[str, Any] = field(default_factory=dict[str, Any])
    """The server's options as anybody with a key may see them."""


@dataclass(frozen=True, kw_only=True)
class Apis:
    """Which of them there are, and what they keep."""

    max_stored_responses: int = 1000
    """Of /v1/responses, for GET and `previous_response_id`; 0 stores none."""
    max_stored_response_bytes: int = 256 << 20
    embeddings_only: bool = False
    """No route that generates."""
    embedding_pooling: Literal["auto", "last", "mean"] = "auto"
    """Where a request names none; auto is what the model's files state, else `last`."""


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
    """Without a finished step for so long while requests run, or an answer while none do, the server isn't ready."""
    num_workers: int = 8
    """Threads that render templates and tokenise."""
    reasoning_parser: str | None = None
    """A name of `server/parsers`, auto, or None for none."""
    tool_parser: str | None = None
    api_keys: tuple[str, ...] = ()
    cache_salt_from_api_key: bool = False
    """A prefix is shared by requests of one API key only; needs `api_keys`."""
    operations: Operations = Operations()
    apis: Apis = Apis()
    rules: RequestRules = field(default_factory=RequestRules)


@dataclass(frozen=True)
class _Begun:
    """What there is from the start on."""

    info: asyncio.Future[wire.ModelInfo]
    tasks: list[asyncio.Future[None]]


class Service:
    """Lives on the event loop. Only the router and the jobs are shared with the pump's thread."""

    def __init__(self, options: ServiceOptions, load_text: Callable[[], TextSide]) -> None:
        """`load_text` is called on a worker thread while the runtime loads."""
        self.options = options
        self.state: State = "loading"
        self.failure: wire.Failed | None = None
        self.router = Router(options.operations.front)
        self.counters = Counters()
        self.meter = Meter(Metrics(options.model_name, buckets=options.operations.buckets))
        self.jobs: set[Job] = set()
        self.workers = ThreadPoolExecutor(options.num_workers, thread_name_prefix=WORKER_NAME)
        self.changed = asyncio.Event()
        """Set whenever the state changes or a job ends; whoever waits clears it."""
        self._load_text = load_text
        self._kitchen: Kitchen | None = None
        self._begun: _Begun | None = None
        self._link: RuntimeLink | None = None
        self._pump = Pump(self.router, deliver=self._deliver_soon, on_control=self._control_soon)
        self.stall = StallWatch(
            self, options.stall_timeout_s, on_stall=self.meter.metrics.counters["engine_stalls"].inc
        )

    # ---- life --------------------------------------------------------------------------------

    def start(self, address: str) -> None:
        """Connect to the runtime, which may still be loading."""
        info: asyncio.Future[wire.ModelInfo] = asyncio.get_running_loop().create_future()
        work = self._become_ready(info), *self.stall.watchers()
        self._begun = _Begun(info, [asyncio.ensure_future(each) for each in work])
        self._pump.start()
        self._link = RuntimeLink(address, self._pump.put, front=self.router.front, on_failure=self._link_failed)
        self._link.start()

    async def close(self) -> None:
        self._pump.close()
        for task in [] if self._begun is None else self._begun.tasks:
            task.cancel()
        if self._link is not None:
            await self._link.close()
        self.workers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.options.operations.tracer.close)

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
            self.meter.abandon(job.collectors, code)
            written = job.fail(message, status=status, code=code)
            self._deliver_one(job, written.data, written.error)

    def _set_state(self, state: State) -> None:
        self.state = state
        self.changed.set()

    @property
    def num_jobs(self) -> int | None:
        """Requests under way; None while no engine need be there."""
        return len(self.jobs) if self.state == "ready" else None

    @property
    def progress_s(self) -> float:
        """time.monotonic() when the engine last told of a step, or got something to do."""
        return self._pump.progress_s

    async def answer(self) -> None:
        """Returns when the engine has answered a question."""
        assert self._link is not None
        await self._link.ask(wire.GetStats(drain=False), timeout_s=None)

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

    def require_entry(self) -> None:
        """Raises Unavailable: the server doesn't take requests, or its queue is full."""
        self.kitchen()
        self._require_room(self.counters.entering + 1, 0)

    @contextlib.contextmanager
    def entering(self) -> Generator[Kitchen]:
        """While a request is prepared: it has its place in the queue before any work is done for it."""
        self.require_entry()
        kitchen = self.kitchen()
        self.counters.entering += 1
        try:
            yield kitchen
        finally:
            self.counters.entering -= 1

    def submit(self, prepared: Prepared, *, is_probe: bool = False, trace: Trace = NO_TRACE) -> Job:
        """Accept a prepared request; from now on it ends in exactly one way. A probe finds room in a full queue too.

        Raises:
            Unavailable: the server doesn't take requests (any more), or its queue is full.
        """
        self.kitchen()
        requests = prepared.requests
        if not is_probe:
            self._require_room(len(requests), sum(len(request.prompt) for request in requests))
        frame = prepared.frame  # first: a request that can't travel leaves nothing behind
        job = Job(prepared.answer, Feed(), trace=trace)
        for collector in prepared.collectors:
            job.add(collector)
            self.router.add(collector)
        if not self.jobs:
            self._pump.progress_s = time.monotonic()
        self.jobs.add(job)
        self.counters.accepted += 1
        self.meter.accept(job.collectors)
        self._send_frame(frame)
        return job

    def info(self) -> wire.ModelInfo:
        """Of the model that is served. Raises Unavailable until it is there."""
        return self.kitchen().builder.info

    async def ask(self, question: wire.Question, *, timeout_s: float | None = None) -> wire.Answer:
        """Raises Unavailable: no engine, or no answer in time."""
        self.kitchen()
        assert self._link is not None
        answer = await self._link.ask(question, timeout_s=timeout_s or ASK_TIMEOUT_S)
        self.kitchen()
        if answer is None:
            raise Unavailable("the engine gave no answer in time", code="no_answer")
        return answer

    def abort(self, job: Job, reason: str = "disconnected") -> None:
        """The client has gone, or whatever else `LEFT` names: stop its work at once, queued or running."""
        if job not in self.jobs:
            return
        self.counters.disconnected += reason == "disconnected"
        log.info("request %s: %s", job.answer.label, LEFT[reason])
        self._abort_ids(job)
        self.meter.abandon(job.collectors, reason)
        job.ended = True
        self._deliver_one(job, b"", RequestError(LEFT[reason], status=GONE_STATUS))

    def _abort_ids(self, job: Job) -> None:
        ids = [request_id for collector in job.collectors for request_id in self.router.remove(collector)]
        if ids:
            self._send(wire.Abort(ids))

    def _require_room(self, num_requests: int, num_tokens: int) -> None:
        """Each server process has its share of the queue."""
        options, share = self.options, self.options.operations.num_fronts
        limit, waiting = options.max_queued_requests, self.router.num_waiting
        if limit is not None and waiting + num_requests > -(-limit // share):
            raise self._full(f"{limit} requests", waiting)
        limit = options.max_queued_tokens
        if limit is not None and self.router.num_waiting_tokens + num_tokens > -(-limit // share):
            raise self._full(f"{limit} prompt tokens", waiting)

    def _full(self, limit: str, num_waiting: int) -> Unavailable:
        """A client may come back when about half of those that wait have begun."""
        wait_s = math.ceil(self.meter.wait_of(-(-num_waiting // 2)))
        return Unavailable(
            f"the queue is full ({limit})",
            status=429,
            code="queue_full",
            retry_after_s=min(max(wait_s, 1), MAX_RETRY_S),
        )

    def _send(self, message: wire.Up) -> None:
        self._send_frame(wire.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        if self._link is not None and self.state != "failed":
            self._link.send(frame)

    def _link_failed(self, error: BaseException) -> None:
        self.fail(wire.Failed(f"the link to the runtime broke: {type(error).__name__}: {error}"))

    # ---- from the pump -----------------------------------------------------------------------

    def _deliver_soon(self, batch: Batch, aborts: list[wire.Abort]) -> None:
        self._soon(lambda: self._deliver(batch, aborts))

    def _control_soon(self, message: wire.Down) -> None:
        self._soon(lambda: self._control(message))

    def _soon(self, call: Callable[[], None]) -> None:
        assert self._begun is not None
        try:
            self._begun.info.get_loop().call_soon_threadsafe(call)
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
        self.meter.abandon(job.collectors, "")  # where all have ended well, none is left to count
        if error is not None:
            job.feed.fail(error)
        else:
            job.feed.put(data, last=True)
        self.jobs.discard(job)
        self.changed.set()
        job.trace.end(job, error or job.error)

    def _control(self, message: wire.Down) -> None:
        assert self._begun is not None
        if isinstance(message, wire.Failed):
            self.fail(message)
        elif isinstance(message, wire.Ready) and not self._begun.info.done():
            self._begun.info.set_result(message.info)
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
        pooling = self.options.apis.embedding_pooling
        return Kitchen(
            model_name=self.options.model_name,
            tokenizer=text.tokenizer,
            template=text.template,
            builder=text.builder(info),
            allocate=self.router.allocate,
            stream_interval=self.options.stream_interval,
            timeout_s=self.options.request_timeout_s,
            salt_from_api_key=self.options.cache_salt_from_api_key,
            parsing=choose_parsing(
                self.options.reasoning_parser,
                self.options.tool_parser,
                template=text.template,
                tokenizer=text.tokenizer,
                model_type=info.model_type,
            ),
            pooling=text.pooling if pooling == "auto" else pooling,
            rules=self.options.rules,
        )
