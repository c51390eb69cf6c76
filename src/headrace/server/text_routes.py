"""The routes that show a text as tokens and back, and a chat as the model reads it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace.front.errors import RequestError
from headrace.params import SamplingParams
from headrace.server.bodies import Body, ChatBody, as_body, parse_body
from headrace.server.logprobs import token_name
from headrace.server.prepare import Kitchen
from headrace.server.service import Service
from headrace.server.text_work import answer_text
from headrace.text.tokenizer import Tokenizer

__all__ = ["DetokenizeBody", "TokenizeBody", "add_text_routes"]


class TokenizeBody(Body):
    """POST /tokenize. Either `prompt`, or `messages` and what else a chat has."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


def add_text_routes(app: FastAPI, service: Service) -> None:
    routes = _TextRoutes(service)
    app.add_route("/tokenize", routes.tokenize, ["POST"])
    app.add_route("/_internal/tokenize", routes.tokenize, ["POST"])
    app.add_route("/detokenize", routes.detokenize, ["POST"])
    app.add_route("/render", routes.render, ["POST"])


class _TextRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or a chat."""
        return await answer_text(self._service, request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await answer_text(self._service, request, detokenize)

    async def render(self, request: Request) -> Response:
        """What the chat template makes of messages, with its token ids."""
        return await answer_text(self._service, request, render)


def tokenize(kitchen: Kitchen, data: bytes) -> dict[str, Any]:
    """The ids that a completion of the prompt, or a chat of the messages, would begin with."""
    body, _ = parse_body(data, TokenizeBody)
    kitchen.check_model(body.model)
    tokenizer = _tokenizer(kitchen)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        ids = kitchen.builder.encode(
            body.prompt,
            SamplingParams(add_special_tokens=body.add_special_tokens is not False),
            most=kitchen.most_counted,
        )
    else:
        fields = body.model_dump(exclude_none=True, exclude={"return_token_strs"})
        ids = kitchen.rendered(as_body(fields, ChatBody)[0], most=kitchen.most_counted).ids
    names = {"token_strs": [token_name(tokenizer, id) for id in ids]} if body.return_token_strs else {}
    return {"count": len(ids), "max_model_len": kitchen.builder.info.max_seq_len, "tokens": ids, **names}


def detokenize(kitchen: Kitchen, data: bytes) -> dict[str, Any]:
    """The text of ids, special tokens included unless `skip_special_tokens`."""
    body, _ = parse_body(data, DetokenizeBody)
    kitchen.check_model(body.model)
    tokenizer, size = _tokenizer(kitchen), kitchen.builder.info.num_valid_ids
    bad = next((id for id in body.tokens if not 0 <= id < size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is out of the vocabulary: ids are 0 to {size - 1}", param="tokens")
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))}


def render(kitchen: Kitchen, data: bytes) -> dict[str, Any]:
    """The prompt of a chat body, as text and as ids; nothing is generated."""
    body, _ = parse_body(data, ChatBody)
    kitchen.check_model(body.model)
    text, ids = kitchen.rendered(body, most=kitchen.most_counted)
    return {"prompt": text, "prompt_token_ids": ids, "count": len(ids)}


def _tokenizer(kitchen: Kitchen) -> Tokenizer:
    if kitchen.tokenizer is None:
        raise RequestError("this engine has no tokenizer: it takes ids and answers with ids", param="prompt")
    return kitchen.tokenizer
