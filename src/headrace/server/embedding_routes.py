"""/v1/embeddings: what the model's last hidden states say about texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace.front.builder import RequestOptions
from headrace.front.collector import Choice, Collector
from headrace.front.embedding import check_dimensions, pooling_of, to_embedding
from headrace.front.errors import RequestError
from headrace.front.outputs import TokenUsage
from headrace.params import FieldError, SamplingParams
from headrace.server.answer import Answer, Api
from headrace.server.bodies import Body, parse_body
from headrace.server.generating import Generate
from headrace.server.prepare import Kitchen, Prepared, prompts_of
from headrace.server.renamed import renamed
from headrace.server.tenancy import Caller

__all__ = ["EmbeddingBody", "add_embedding_routes"]

MAX_INPUTS = 2048


class EmbeddingBody(Body):
    """POST /v1/embeddings. The fields after `dimensions` are ours."""

    INERT: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    input: Any = None
    """Text, a list of texts, ids, or a list of lists of ids."""
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: float | None = None
    timeout: float | None = None


def add_embedding_routes(app: FastAPI, generate: Generate) -> None:
    """`generate` runs a request as the other routes do."""

    async def create(request: Request) -> Response:
        """Vectors of texts."""
        return await generate(request, prepare)

    app.add_route("/v1/embeddings", create, ["POST"])


def prepare(kitchen: Kitchen, data: bytes, caller: Caller) -> Prepared:
    """Raises RequestError, naming the field."""
    body, unknown = parse_body(data, EmbeddingBody)
    kitchen.check_model(body.model)
    if body.encoding_format not in (None, "float", "base64"):
        raise RequestError("encoding_format must be 'float' or 'base64'", param="encoding_format")
    check_dimensions(body.dimensions, kitchen.builder.info.hidden_size)
    writer = partial(EmbeddingWriter, body=body)
    api = Api("embd-", writer, prompt="input", has_free_ids=True, operation="embeddings")
    answer = Answer(api=api, model=kitchen.model_name, client_id=caller.request_id)
    options = RequestOptions(
        pooling=pooling_of(body.pooling or kitchen.pooling),
        priority=0.5 if body.priority is None else body.priority,
        timeout_s=kitchen.time_limit_s(body.timeout),
        arrival_s=caller.arrived_s,
        param=api.prompt,
        label=answer.label,
    )
    with renamed({"prompt": "input"}):
        return _prepared(kitchen, answer, body, options, unknown)


def _prepared(
    kitchen: Kitchen, answer: Answer, body: EmbeddingBody, options: RequestOptions, unknown: list[str]
) -> Prepared:
    prompts = prompts_of(body.input)
    if len(prompts) > MAX_INPUTS:
        raise RequestError(f"input has {len(prompts)} items; at most {MAX_INPUTS} are taken", param="prompt")
    try:
        params = SamplingParams(
            max_tokens=1,
            detokenize=False,
            add_special_tokens=body.add_special_tokens is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
    except FieldError as error:
        raise RequestError(str(error), param=error.field) from None
    prepared = Prepared(answer, [], [], unknown)
    for prompt in prompts:
        ids = kitchen.builder.encode(prompt, params) if isinstance(prompt, str) else prompt
        requests, resolved = kitchen.builder.build(ids, params, allocate=kitchen.allocate, options=options)
        prepared.collectors.append(Collector(requests, resolved, tokenizer=None, streaming=False))
        prepared.requests.extend(requests)
    return prepared


class EmbeddingWriter:
    """How an answer is written; there are no streams of embeddings."""

    def __init__(self, answer: Answer, body: EmbeddingBody) -> None:
        self._answer = answer
        self._body = body

    def response(self, collectors: Sequence[Collector]) -> bytes:
        usage = self._answer.total_usage(collectors)
        return msgspec.json.encode(
            {
                "object": "list",
                "id": self._answer.id,
                "created": self._answer.created,
                "model": self._answer.model,
                "data": [self._entry(at, collector) for at, collector in enumerate(collectors)],
                "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
            }
        )

    def _entry(self, index: int, collector: Collector) -> dict[str, Any]:
        body = self._body
        if not collector.embedding:
            raise ValueError(f"input {index} has no embedding: it ended as {collector.choices[0].finish}")
        values = to_embedding(collector.embedding, dimensions=body.dimensions, normalize=body.normalize is not False)
        is_binary = body.encoding_format == "base64"
        shown = base64.b64encode(values.astype("<f4").tobytes()).decode() if is_binary else values.tolist()
        return {"object": "embedding", "index": index, "embedding": shown}

    def opening(self, choice: Choice, prompt: int) -> bytes:
        raise AssertionError("embeddings aren't streamed")

    def piece(self, choice: Choice, prompt: int, *, parts_from: int, tokens_from: int, events_from: int) -> bytes:
        raise AssertionError("embeddings aren't streamed")

    def end(self, choice: Choice, prompt: int) -> bytes:
        raise AssertionError("embeddings aren't streamed")

    def closing(self, usage: TokenUsage) -> bytes:
        raise AssertionError("embeddings aren't streamed")

    def failure(self, error: RequestError) -> bytes:
        raise AssertionError("embeddings aren't streamed")
