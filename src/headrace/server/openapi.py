"""The OpenAPI document of the routes that an application has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.auth import OPEN_PATHS
from headrace.server.bodies import ChatBody, CompletionBody, PinBody, ProfileBody, UnpinBody
from headrace.server.embedding_routes import EmbeddingBody
from headrace.server.message_body import CountBody, MessageBody
from headrace.server.response_body import ResponseBody
from headrace.server.text_routes import DetokenizeBody, TokenizeBody

__all__ = ["BODIES", "STREAMING", "add_document", "document_of"]

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessageBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/_internal/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/render": ChatBody,
    "/kv_cache/pin": PinBody,
    "/kv_cache/unpin": UnpinBody,
    "/start_profile": ProfileBody,
}
"""What POST takes there. A route without a body has no place here."""

MESSAGES = [{"role": "user", "content": "What is a headrace?"}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 16},
    "/v1/completions": {"prompt": "A headrace is", "max_tokens": 16},
    "/v1/responses": {"input": "What is a headrace?", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "A headrace is a channel."},
    "/tokenize": {"prompt": "A headrace"},
    "/detokenize": {"tokens": [65, 66]},
    "/render": {"messages": MESSAGES},
    "/kv_cache/pin": {"name": "system", "prompt": "You are helpful."},
    "/kv_cache/unpin": {"name": "system"},
    "/start_profile": {"num_steps": 10},
}

STREAMING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
TEXT = frozenset({"/metrics", "/prometheus/metrics", "/health", "/health_generate"})
SCHEMAS = "#/components/schemas/"
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
KEYS = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}


def add_document(app: FastAPI, *, model_name: str, has_keys: bool) -> None:
    """GET /openapi.json. Last of all routes: it tells of those that are there."""
    text = msgspec.json.encode(document_of(app, model_name=model_name, has_keys=has_keys))

    async def openapi(request: Request) -> Response:
        """This document."""
        return Response(text, media_type="application/json")

    app.add_route("/openapi.json", openapi, ["GET"])


def document_of(app: FastAPI, *, model_name: str, has_keys: bool) -> dict[str, Any]:
    models = sorted(set(BODIES.values()), key=lambda cls: cls.__name__)
    _, schemas = models_json_schema([(cls, "validation") for cls in models], ref_template=SCHEMAS + "{model}")
    definitions: dict[str, Any] = schemas.get("$defs", {})
    for cls in models:
        properties = definitions[cls.__name__]["properties"]
        if "model" in properties:
            properties["model"] = {"title": "Model", "enum": [model_name], "description": "Nothing else is served."}
    paths: dict[str, dict[str, Any]] = {}
    for route in _routes(app):
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, has_keys=has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": app.version},
        "paths": paths,
        "components": {"schemas": {**definitions, "Error": ERROR}, "securitySchemes": KEYS},
    }


def _routes(app: FastAPI) -> Iterable[Route]:
    return (route for route in app.routes if isinstance(route, Route))


def _operation(route: Route, path: str, method: str, *, has_keys: bool) -> dict[str, Any]:
    told = inspect.getdoc(route.endpoint) or ""
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": " ".join(told.split("\n\n")[0].split()) or path,
        "responses": {
            "200": {"description": "As asked.", "content": _contents(path)},
            "default": {
                "description": "Why not.",
                "content": {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}},
            },
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    body = BODIES.get(path) if method == "POST" else None
    if body is not None:
        content: dict[str, Any] = {"schema": {"$ref": f"{SCHEMAS}{body.__name__}"}}
        if path in EXAMPLES:
            content["example"] = EXAMPLES[path]
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if has_keys and path not in OPEN_PATHS:
        operation["security"] = [{name: []} for name in KEYS]
    return operation


def _contents(path: str) -> dict[str, Any]:
    if path in TEXT:
        return {"text/plain": {}}
    kinds: dict[str, Any] = {"application/json": {}}
    if path in STREAMING:
        kinds["text/event-stream"] = {}
    return kinds
