"""The routes of Anthropic's Messages API."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace.server.anthropic_errors import anthropic_error_response
from headrace.server.bodies import ChatBody, as_body, as_chat, parse_body
from headrace.server.generating import Generate
from headrace.server.message_body import FROM_CHAT, NOT_PASSED_ON, CountBody, MessageBody, chat_fields
from headrace.server.message_writer import MESSAGE
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.renamed import names_for, renamed
from headrace.server.replies import GONE_STATUS
from headrace.server.service import Service
from headrace.server.tenancy import Caller
from headrace.server.text_work import answer_text

__all__ = ["add_message_routes"]


def add_message_routes(app: FastAPI, service: Service, generate: Generate) -> None:
    """`generate` runs a request as the other routes do."""
    routes = _MessageRoutes(service, generate)
    app.add_route("/v1/messages", routes.create, ["POST"])
    app.add_route("/v1/messages/count_tokens", routes.count, ["POST"])


class _MessageRoutes:
    def __init__(self, service: Service, generate: Generate) -> None:
        self._service = service
        self._generate = generate

    async def create(self, request: Request) -> Response:
        """A chat's next message, as Anthropic's clients ask for it."""
        return _named(await self._generate(request, prepare, anthropic_error_response))

    async def count(self, request: Request) -> Response:
        """Tokens of the prompt that these messages make."""
        return _named(await answer_text(self._service, request, count, anthropic_error_response))


def prepare(kitchen: Kitchen, data: bytes, caller: Caller) -> Prepared:
    """Raises RequestError or NotImplementedError, naming the field."""
    body, unknown = parse_body(data, MessageBody)
    fields = chat_fields(body)
    with renamed(names_for(FROM_CHAT, body, without_effect=NOT_PASSED_ON)):
        chat, unknown = as_chat(fields, unknown, without_effect=NOT_PASSED_ON)
        return kitchen.chat_of(chat, unknown, caller, api=MESSAGE)


def count(kitchen: Kitchen, data: bytes) -> dict[str, Any]:
    body, _ = parse_body(data, CountBody)
    with renamed(names_for(FROM_CHAT, body, without_effect=NOT_PASSED_ON)):
        chat, _ = as_body(chat_fields(body), ChatBody)
        kitchen.check_model(chat.model)
        return {"input_tokens": len(kitchen.rendered(chat, most=kitchen.most_counted).ids)}


def _named(response: Response) -> Response:
    """The header that this API's clients show with errors."""
    if response.status_code != GONE_STATUS:
        response.headers["request-id"] = response.headers.get("x-request-id") or f"req_{uuid.uuid4().hex}"
    return response
