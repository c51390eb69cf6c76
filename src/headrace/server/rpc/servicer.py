"""The methods of the token-level service, over the same `Service` as HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import msgspec
import numpy as np
from starlette.datastructures import Headers

from headrace import wire
from headrace.front.cache import require_events
from headrace.front.errors import RequestError
from headrace.log import get
from headrace.server.errors import Unavailable
from headrace.server.job import Job
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.replies import GONE_STATUS, refusal_of
from headrace.server.rpc.frames import read_frames
from headrace.server.rpc.kv_stream import KvBatches
from headrace.server.rpc.messages import message, methods
from headrace.server.rpc.requests import prepare_embed, prepare_generate
from headrace.server.rpc.status import code_of, trailers_of
from headrace.server.service import Service
from headrace.server.tenancy import Caller

__all__ = ["Servicer", "headers_of", "refuse"]

DEADLINE_SLACK_S = 0.1
"""The client's clock began before ours: it ends a call by so much before the deadline that we know of."""
STALL_TIMEOUT_S = 30.0
"""A client that takes nothing for so long is given up."""
KV_PERIOD_S = 0.1
FEATURES = ("streaming", "guided_decoding", "beam_search", "logprobs", "prompt_logprobs", "kv_cache_retention")

log = get("server")

Context = grpc.aio.ServicerContext[Any, Any]


class Servicer:
    """Answers are bytes: they were made on the thread that makes all text."""

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version
        self._jobs: dict[str, Job] = {}
        """Of Generate calls that run, by what their clients call them."""
        self._batches = KvBatches()
        self._has_reader = False

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the methods' names."""
        calls: dict[str, Callable[[Any, Context], Any]] = {
            "Generate": self.generate,
            "Embed": self.embed,
            "HealthCheck": self.health_check,
            "Abort": self.abort,
            "GetModelInfo": self.model_info,
            "GetServerInfo": self.server_info,
            "SubscribeKvEvents": self.kv_events,
        }
        found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, method in methods().items():
            make: Any = grpc.unary_stream_rpc_method_handler if method.server_streaming else (
                grpc.unary_unary_rpc_method_handler
            )  # fmt: skip
            read = message(method.input_type.full_name).FromString
            found[name] = make(calls[name], request_deserializer=read, response_serializer=_to_bytes)
        return found

    async def generate(self, request: Any, context: Context) -> None:
        """Chunks as they come; the end of the call, whoever ends it, ends the request."""
        job: Job | None = None
        name: str = request.request_id
        trace = self._service.options.operations.tracer.begin(headers_of(context.invocation_metadata()))
        try:
            if name in self._jobs:
                raise RequestError(f"request_id {name!r} is running: choose another", param="request_id",
                                   code="already_exists")  # fmt: skip
            left_s = context.time_remaining()
            prepared = await self._prepared(
                context, lambda kitchen, caller: prepare_generate(kitchen, request, caller, timeout_s=left_s)
            )
            job = self._service.submit(prepared, trace=trace)
            self._jobs[name or prepared.answer.id] = job
        except Exception as error:
            refusal = refusal_of(error)
            trace.refuse(refusal)
            await self._refuse(context, refusal)
        assert job is not None
        try:
            await self._write(job, context)
        finally:
            self._jobs.pop(name or job.answer.id, None)
            left_s = cast("float | None", context.time_remaining())  # None: no deadline
            # Finds something to do only where the call was cut.
            self._service.abort(job, "deadline" if left_s is not None and left_s < DEADLINE_SLACK_S else "disconnected")

    async def _write(self, job: Job, context: Context) -> None:
        """A write waits until the client has room for it."""
        task, last = asyncio.current_task(), False
        assert task is not None
        given_up = asyncio.Event()

        def give_up() -> None:
            log.warning("request %s: its client has taken nothing for %g s", job.answer.label, STALL_TIMEOUT_S)
            given_up.set()
            task.cancel()

        while not last:
            data, last = await job.feed.next()
            if job.feed.error is not None:
                await self._refuse(context, job.feed.error)
            for piece in read_frames(data):
                if isinstance(piece, RequestError):
                    await self._refuse(context, piece)
                else:
                    timer = asyncio.get_running_loop().call_later(STALL_TIMEOUT_S, give_up)
                    try:
                        await context.write(piece)
                    except asyncio.CancelledError:
                        if not given_up.is_set():  # its client has ended it
                            raise
                        self._service.abort(job)  # first: the status waits for room, too
                        await context.abort(grpc.StatusCode.CANCELLED, "the client has taken nothing for too long")
                    finally:
                        timer.cancel()

    async def embed(self, request: Any, context: Context) -> Any:
        job: Job | None = None
        try:
            prepared = await self._prepared(context, lambda kitchen, caller: prepare_embed(kitchen, request, caller))
            job = self._service.submit(prepared)
            data, _ = await job.feed.next()
            if job.feed.error is not None:
                raise job.feed.error
        except Exception as error:
            await self._refuse(context, refusal_of(error))
            raise
        finally:
            if job is not None:
                self._service.abort(job)
        body = msgspec.json.decode(data)
        values = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
        return message("EmbedResponse")(
            request_id=request.request_id, embedding=values.tolist(), prompt_tokens=body["usage"]["prompt_tokens"]
        )

    async def health_check(self, request: Any, context: Context) -> Any:
        state = "stalled" if self._service.stall.is_stalled else self._service.state
        return message("HealthCheckResponse")(status="OK" if state == "ready" else state)

    async def abort(self, request: Any, context: Context) -> Any:
        job = self._jobs.get(request.request_id)
        if job is None:
            return message("AbortResponse")(success=False, message="no such request runs in this process")
        self._service.abort(job, "requested")
        return message("AbortResponse")(success=True, message="")

    async def model_info(self, request: Any, context: Context) -> Any:
        info = await self._info(context)
        return message("GetModelInfoResponse")(
            model_id=self._service.options.model_name,
            max_input_len=info.max_seq_len - 1,
            max_seq_len=info.max_seq_len,
            max_batch_size=info.max_batch_size,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            supported_features=FEATURES,
        )

    async def server_info(self, request: Any, context: Context) -> Any:
        settings = (await self._info(context)).startup.settings
        sizes = {
            name: int(settings.get(name) or 1)
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        }
        world = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"] * sizes["context_parallel_size"]
        return message("GetServerInfoResponse")(
            version=f"headrace {self._version}", backend="pytorch", world_size=world, **sizes
        )

    async def kv_events(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Until the reader leaves. Events are kept for one reader: what it takes, POST /kv_cache_events doesn't get."""
        if self._has_reader:
            await self._refuse(context, RequestError("another call reads the events", code="one_reader", status=409))
        self._has_reader = True
        try:
            while True:
                try:
                    require_events(self._service.info())
                    answer = await self._service.ask(wire.GetKvEvents())
                except Exception as error:
                    await self._refuse(context, refusal_of(error))
                    raise
                assert isinstance(answer, wire.KvEvents)
                batch = self._batches.batch_of(answer.events)
                if batch is not None:
                    yield batch
                await asyncio.sleep(KV_PERIOD_S)
        finally:
            self._has_reader = False

    async def _prepared(self, context: Context, prepare: Callable[[Kitchen, Caller], Prepared]) -> Prepared:
        """On a worker thread. Raises what `prepare` raises, and Unavailable."""
        caller = Caller.of(headers_of(context.invocation_metadata()))
        with self._service.entering() as kitchen:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._service.workers, prepare, kitchen, caller)
            except asyncio.CancelledError:
                if self._service.state == "ready":
                    raise
                raise Unavailable("the server is shutting down", code="shutting_down") from None

    async def _info(self, context: Context) -> wire.ModelInfo:
        try:
            return self._service.info()
        except Unavailable as error:
            await self._refuse(context, error)
            raise

    async def _refuse(self, context: Context, error: RequestError) -> None:
        """Never returns."""
        if error.status != GONE_STATUS:
            self._service.counters.rejected += 1
            self._service.meter.metrics.count("request_error", str(error.status))
        await refuse(context, error)


async def refuse(context: Context, error: RequestError) -> None:
    """Never returns."""
    await context.abort(code_of(error), error.message, trailers_of(error))


def headers_of(metadata: Any) -> Headers:
    """The metadata of a call, as headers are read elsewhere."""
    pairs = [(key.encode(), value.encode()) for key, value in metadata or () if isinstance(value, str)]
    return Headers(raw=pairs)


def _to_bytes(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
