"""The HTTP routes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from headrace.front.errors import RequestError
from headrace.front.tracing import Trace
from headrace.log import get
from headrace.server.cache_routes import add_cache_routes
from headrace.server.embedding_routes import add_embedding_routes
from headrace.server.errors import Unavailable, error_body, error_response, model_not_found
from headrace.server.event_stream import EventStream
from headrace.server.generating import Prepare
from headrace.server.map_routes import add_map_routes
from headrace.server.message_routes import add_message_routes
from headrace.server.openapi import add_document
from headrace.server.operation_routes import add_operation_routes
from headrace.server.page import add_page
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.reading import BodyRoom, read_json
from headrace.server.replies import Refuse, gone, refusal_of
from headrace.server.response_routes import add_response_routes
from headrace.server.service import Service
from headrace.server.tenancy import Caller
from headrace.server.text_routes import add_text_routes
from headrace.server.timing import timing_of
from headrace.server.wrapping import wrap

__all__ = ["make_app"]

log = get("server")

MAX_WARNING_LENGTH = 1000
MAX_WARNED_NAMES = 1000


def make_app(service: Service, *, version: str) -> FastAPI:
    """An ASGI application over `service`."""
    app = FastAPI(title="Headrace", version=version, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # a path is right or unknown
    app.state.bodies = BodyRoom()
    routes = Routes(service)
    add_operation_routes(app, service, version)
    app.add_route("/v1/models", routes.models, ["GET"])
    app.add_route("/v1/models/{name:path}", routes.one_model, ["GET"])
    if not service.options.apis.embeddings_only:
        app.add_route("/v1/chat/completions", routes.chat, ["POST"])
        app.add_route("/v1/completions", routes.completions, ["POST"])
        add_response_routes(app, service, routes.generate)
        add_message_routes(app, service, routes.generate)
    add_cache_routes(app, service, routes.generate)
    add_map_routes(app, service)
    add_embedding_routes(app, routes.generate)
    add_text_routes(app, service)
    if service.options.operations.page:
        add_page(app)
    add_document(app, model_name=service.options.model_name, has_keys=bool(service.options.api_keys))
    app.add_exception_handler(HTTPException, _http_error)
    wrap(app, service)
    return app


class Routes:
    """The handlers. None of them waits for the tokenizer, or computes, on the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """The model, if it is called so."""
        name = request.path_params["name"]
        served = self._service.options.model_name
        return JSONResponse(self._card()) if name == served else error_response(model_not_found(name, served))

    async def chat(self, request: Request) -> Response:
        """A chat's next message, as OpenAI's clients ask for it."""
        return await self.generate(request, Kitchen.chat)

    async def completions(self, request: Request) -> Response:
        """A prompt's continuation, as OpenAI's clients ask for it."""
        return await self.generate(request, Kitchen.completion)

    def _card(self) -> dict[str, Any]:
        name = self._service.options.model_name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "headrace"}

    async def generate(self, request: Request, prepare: Prepare, refuse: Refuse = error_response) -> Response:
        """Run a request of the model; `refuse` writes errors that come before the first byte."""
        departed: asyncio.Task[None] | None = None
        response = gone()
        trace = self._service.options.operations.tracer.begin(request.headers)
        try:
            caller = Caller.of(request.headers)
            self._service.require_entry()
            async with read_json(request) as data:
                with self._service.entering() as kitchen:
                    departed = asyncio.create_task(departure(request.receive))
                    running = self._service.workers.submit(_prepare, prepare, kitchen, data, caller)
                    work = asyncio.wrap_future(running)
                    await asyncio.wait({work, departed}, return_when=asyncio.FIRST_COMPLETED)
                    if not work.done() and not running.cancel():
                        await asyncio.wait({work})  # the client has left; a worker ends what it has begun
                        work.exception()  # nobody's any more
                        return response
            response = await self._answer(work, departed, refuse, trace)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # still preparing when the time to shut down was up
            refusal = Unavailable("the server is shutting down", code="shutting_down")
            trace.refuse(refusal)
            response = refuse(refusal)
        except Exception as error:
            self._service.counters.rejected += 1
            refusal = refusal_of(error)
            trace.refuse(refusal)
            response = refuse(refusal)
        finally:
            if departed is not None and not isinstance(response, EventStream):
                departed.cancel()
        return response

    async def _answer(
        self, work: asyncio.Future[Prepared], departed: asyncio.Task[None], refuse: Refuse, trace: Trace
    ) -> Response:
        """The response; one that streams takes over `departed`, which tells that the client has left."""
        service = self._service
        if not work.done():
            work.cancel()
            return gone()
        prepared = work.result()
        if prepared.unknown and service.options.operations.strict_fields:
            name = prepared.unknown[0]
            raise RequestError(f"{name[:100]} is an unknown field: leave it out", param=name, code="unknown_field")
        job = service.submit(prepared, trace=trace)
        departed.add_done_callback(lambda task: None if task.cancelled() else service.abort(job))
        body, last = await job.feed.next()
        if job.feed.error is not None:
            return refuse(job.feed.error)
        headers = {"x-request-id": prepared.answer.client_id or prepared.answer.id, **self._warnings(prepared.unknown)}
        if not prepared.answer.stream:
            timing = timing_of(job.collectors)
            if timing is not None:
                headers["server-timing"] = timing.header
            return Response(body, 200, headers, "application/json")

        def end() -> None:
            departed.cancel()
            service.abort(job)  # only finds something to do when the stream was cut

        return EventStream(job.feed, body, last=last, headers=headers, on_end=end)

    def _warnings(self, unknown: list[str]) -> dict[str, str]:
        """Unknown fields: a log line for each name once, and a header each time."""
        if not unknown:
            return {}
        warned = self._service.counters.warned
        for name in unknown:
            short = name[:100]
            if short not in warned and len(warned) < MAX_WARNED_NAMES:
                warned.add(short)
                log.warning("a request has the unknown field %r, which has no effect", short)
        # No header may begin or end with a space, and names of any kind come here.
        names = ", ".join(ascii(name)[1:-1].strip() or "''" for name in unknown)
        return {"x-headrace-warnings": f"unknown fields: {names}"[:MAX_WARNING_LENGTH].rstrip()}


def _prepare(prepare: Prepare, kitchen: Kitchen, data: bytes, caller: Caller) -> Prepared:
    """On a worker, down to the bytes that are sent."""
    prepared = prepare(kitchen, data, caller)
    assert prepared.frame
    return prepared


async def departure(receive: Receive) -> None:
    """Ends when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as clients of this API expect errors."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = error_body(RequestError(str(error.detail), code=code, status=error.status_code))
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
