"""The HTTP routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from headrace.front.errors import RequestError
from headrace.log import get
from headrace.server.auth import ApiKeys
from headrace.server.cache_routes import add_cache_routes
from headrace.server.errors import Unavailable, as_request_error, error_body, error_response, model_not_found
from headrace.server.event_stream import EventStream
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.reading import read_json
from headrace.server.service import Service
from headrace.server.tenancy import Caller

__all__ = ["make_app"]

log = get("server")

Prepare = Callable[[Kitchen, bytes, Caller], Prepared]

MAX_WARNING_LENGTH = 1000
MAX_WARNED_NAMES = 1000
GONE = Response(status_code=499)
"""For nobody: the client has left."""


def make_app(service: Service, *, version: str) -> FastAPI:
    """An ASGI application over `service`."""
    app = FastAPI(title="Headrace", version=version, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # a path is right or unknown
    routes = Routes(service, version)
    app.add_route("/health", routes.health, ["GET"])
    app.add_route("/health/ready", routes.ready, ["GET"])
    app.add_route("/version", routes.version, ["GET"])
    app.add_route("/v1/models", routes.models, ["GET"])
    app.add_route("/v1/models/{name:path}", routes.one_model, ["GET"])
    app.add_route("/v1/chat/completions", routes.chat, ["POST"])
    app.add_route("/v1/completions", routes.completions, ["POST"])
    add_cache_routes(app, service, routes.generate)
    app.add_exception_handler(HTTPException, _http_error)
    if service.options.api_keys:
        app.add_middleware(ApiKeys, keys=service.options.api_keys)
    return app


class Routes:
    """The handlers. None of them waits for the tokenizer, or computes, on the event loop."""

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while the process is up, whatever the engine does."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """200 when requests are answered; 503 while loading, draining, without an engine or with a stuck one."""
        state = "stalled" if self._service.is_stalled else self._service.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        served = self._service.options.model_name
        return JSONResponse(self._card()) if name == served else error_response(model_not_found(name, served))

    async def chat(self, request: Request) -> Response:
        return await self.generate(request, Kitchen.chat)

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, Kitchen.completion)

    def _card(self) -> dict[str, Any]:
        name = self._service.options.model_name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "headrace"}

    async def generate(self, request: Request, prepare: Prepare) -> Response:
        """Run a request of the model."""
        gone: asyncio.Task[None] | None = None
        response: Response = GONE
        try:
            kitchen = self._service.kitchen()
            data = await read_json(request)
            gone = asyncio.create_task(departure(request.receive))
            work = asyncio.get_running_loop().run_in_executor(
                self._service.workers, prepare, kitchen, data, Caller.of(request.headers)
            )
            response = await self._answer(work, gone)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # still preparing when the time to shut down was up
            response = error_response(Unavailable("the server is shutting down", code="shutting_down"))
        except Exception as error:
            refusal = as_request_error(error)
            self._service.counters.rejected += 1
            if refusal.status == 500:
                log.exception("a request failed")
            response = error_response(refusal)
        finally:
            if gone is not None and not isinstance(response, EventStream):
                gone.cancel()
        return response

    async def _answer(self, work: asyncio.Future[Prepared], gone: asyncio.Task[None]) -> Response:
        """The response; one that streams takes over `gone`, which tells that the client has left."""
        service = self._service
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            return GONE
        prepared = work.result()
        job = service.submit(prepared)
        gone.add_done_callback(lambda task: None if task.cancelled() else service.abort(job))
        body, last = await job.feed.next()
        if job.feed.error is not None:
            return error_response(job.feed.error)
        headers = {"x-request-id": prepared.answer.id, **self._warnings(prepared.unknown)}
        if not prepared.answer.stream:
            return Response(body, 200, headers, "application/json")

        def end() -> None:
            gone.cancel()
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
        names = ", ".join(ascii(name)[1:-1] for name in unknown)
        return {"x-headrace-warnings": f"unknown fields: {names}"[:MAX_WARNING_LENGTH]}


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
