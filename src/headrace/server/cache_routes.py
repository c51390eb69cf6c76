"""The routes of the KV cache: its events, its pins, and what it reuses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace import wire
from headrace.front.cache import name_of, require_events, require_reuse
from headrace.front.errors import RequestError
from headrace.server.bodies import UnpinBody, parse_body
from headrace.server.generating import Generate
from headrace.server.prepare import Kitchen
from headrace.server.reading import read_json
from headrace.server.replies import reply
from headrace.server.service import Service

__all__ = ["add_cache_routes"]


def add_cache_routes(app: FastAPI, service: Service, generate: Generate) -> None:
    """`generate` runs a request as the other routes do."""
    routes = _CacheRoutes(service, generate)
    app.add_route("/kv_cache_events", routes.events, ["POST"])
    app.add_route("/kv_cache/pins", routes.pins, ["GET"])
    app.add_route("/kv_cache/pin", routes.pin, ["POST"])
    app.add_route("/kv_cache/unpin", routes.unpin, ["POST"])


class _CacheRoutes:
    def __init__(self, service: Service, generate: Generate) -> None:
        self._service = service
        self._generate = generate

    async def events(self, request: Request) -> Response:
        """All events since the last call, for one reader."""
        return await reply(self._events)

    async def pins(self, request: Request) -> Response:
        """The prompts that are kept."""
        return await reply(self._pins)

    async def pin(self, request: Request) -> Response:
        """Compute a prompt and keep it; answered with all pins."""
        response = await self._generate(request, Kitchen.pin)
        return await reply(self._pins) if response.status_code == 200 else response

    async def unpin(self, request: Request) -> Response:
        """Leave a kept prompt to the cache's usual order; answered with all pins."""
        return await reply(lambda: self._unpin(request))

    async def _events(self) -> list[dict[str, Any]]:
        require_events(self._service.info())
        answer = await self._service.ask(wire.GetKvEvents())
        assert isinstance(answer, wire.KvEvents)
        return answer.events

    async def _pins(self) -> dict[str, Any]:
        require_reuse(self._service.info())
        answer = await self._service.ask(wire.GetPins(0))
        assert isinstance(answer, wire.Pins)
        return {"object": "list", "data": answer.pins}

    async def _unpin(self, request: Request) -> dict[str, Any]:
        require_reuse(self._service.info())
        async with read_json(request) as data:
            body, _ = parse_body(data, UnpinBody)
        answer = await self._service.ask(wire.Unpin(0, name_of(body.name, "name")))
        assert isinstance(answer, wire.Pins)
        if not answer.found:
            raise RequestError(f"there is no pin {body.name!r}", param="name", code="not_found", status=404)
        return {"object": "list", "data": answer.pins}
