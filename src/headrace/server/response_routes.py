"""The routes of the Responses API."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace.front.errors import RequestError
from headrace.server.answer import Api
from headrace.server.bodies import as_chat, parse_body
from headrace.server.generating import Generate
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.renamed import names_for, renamed
from headrace.server.replies import reply
from headrace.server.response_body import FROM_CHAT, NOT_PASSED_ON, ResponseBody, chat_fields
from headrace.server.response_items import Item, as_items, chat_messages
from headrace.server.response_store import ResponseStore
from headrace.server.response_writer import Asked, ResponseWriter
from headrace.server.service import Service
from headrace.server.tenancy import Caller

__all__ = ["add_response_routes"]


def add_response_routes(app: FastAPI, service: Service, generate: Generate) -> None:
    """`generate` runs a request as the other routes do."""
    apis = service.options.apis
    is_alone = service.options.operations.num_fronts == 1  # a chain's next request may come to another process
    store = ResponseStore(
        max_responses=apis.max_stored_responses if is_alone else 0, max_bytes=apis.max_stored_response_bytes
    )
    routes = _ResponseRoutes(store, generate)
    app.add_route("/v1/responses", routes.create, ["POST"])
    app.add_route("/v1/responses/{id}", routes.one, ["GET"])
    app.add_route("/v1/responses/{id}", routes.delete, ["DELETE"])
    app.add_route("/v1/responses/{id}/cancel", routes.cancel, ["POST"])
    app.add_route("/v1/responses/{id}/input_items", routes.input_items, ["GET"])


class _ResponseRoutes:
    def __init__(self, store: ResponseStore, generate: Generate) -> None:
        self._store = store
        self._generate = generate

    async def create(self, request: Request) -> Response:
        """A response, as OpenAI's newer clients ask for it; it may go on from a stored one."""
        return await self._generate(request, self.prepare)

    async def one(self, request: Request) -> Response:
        """A stored response as it was answered."""
        return await reply(lambda: self._get(request))

    async def delete(self, request: Request) -> Response:
        """Forget a stored response."""
        return await reply(lambda: self._delete(request))

    async def cancel(self, request: Request) -> Response:
        """Nothing to cancel: what is stored has ended, and what runs ends with its connection."""
        return await reply(lambda: self._cancel(request))

    async def input_items(self, request: Request) -> Response:
        """What the request of a stored response said, the last item first unless `order=asc`."""
        return await reply(lambda: self._input_items(request))

    # ---- creating ----------------------------------------------------------------------------

    def prepare(self, kitchen: Kitchen, data: bytes, caller: Caller) -> Prepared:
        """Raises RequestError or NotImplementedError, naming the field."""
        body, unknown = parse_body(data, ResponseBody)
        owner = owner_of(caller)
        items = as_items(body.input)
        before: list[Item] = []
        if body.previous_response_id is not None:
            previous = self._store.get(body.previous_response_id, owner, param="previous_response_id")
            before = [*previous.conversation]
        messages = chat_messages(before, items)
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        fields = chat_fields(body, messages)
        keeps = body.store is not False and self._store.is_on
        asked = Asked(body=body, before=before, items=items, owner=owner, keep=self._store.put if keeps else None)
        with renamed(names_for(FROM_CHAT, body, without_effect=NOT_PASSED_ON)):
            chat, unknown = as_chat(fields, unknown, without_effect=NOT_PASSED_ON)
            api = Api("resp_", partial(ResponseWriter, asked=asked), prompt="input")
            return kitchen.chat_of(chat, unknown, caller, api=api)

    # ---- coming back -------------------------------------------------------------------------

    async def _get(self, request: Request) -> Any:
        if request.query_params.get("stream", "false") == "true":
            raise RequestError("a stored response can't be streamed again: leave stream out", param="stream",
                               code="unsupported_parameter")  # fmt: skip
        found = self._store.get(request.path_params["id"], owner_of(Caller.of(request.headers)))
        return found.body

    async def _delete(self, request: Request) -> Any:
        id = request.path_params["id"]
        self._store.delete(id, owner_of(Caller.of(request.headers)))
        return {"id": id, "object": "response", "deleted": True}

    async def _cancel(self, request: Request) -> Any:
        self._store.get(request.path_params["id"], owner_of(Caller.of(request.headers)))
        raise RequestError("this response has ended; one that runs is cancelled by closing its connection",
                           code="not_cancellable")  # fmt: skip

    async def _input_items(self, request: Request) -> Any:
        found = self._store.get(request.path_params["id"], owner_of(Caller.of(request.headers)))
        items = [{"id": f"{found.id}_{at}", **_as_listed(item)} for at, item in enumerate(found.input_items)]
        if request.query_params.get("order", "desc") != "asc":
            items.reverse()
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return {"object": "list", "data": items, "has_more": False, **ends}


def owner_of(caller: Caller) -> str:
    """Stored responses are seen by the API key that made them."""
    return hashlib.sha256(caller.api_key.encode("utf-8", "surrogateescape")).hexdigest()


def _as_listed(item: Item) -> Item:
    """Short forms written out."""
    content = item.get("content")
    if isinstance(content, str) and item.get("type", "message") == "message":
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
        return {**item, "type": "message", "status": "completed", "content": content}
    return item
