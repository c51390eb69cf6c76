"""/v1/embeddings with the official client."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from headrace.front.fake import FakeLoop, fake_info
from headrace.server.service import Apis

from .harness import Server, running


def embed(server: Server, given: Any, **fields: Any) -> Any:
    return server.client.embeddings.create(model="fake:1", input=given, **fields)


def unit(*values: float) -> list[float]:
    return (np.asarray(values) / np.linalg.norm(values)).tolist()


def fake(ids: list[int], pooling: str = "last") -> list[float]:
    return unit(len(ids), ids[0], ids[-1], 2 if pooling == "mean" else 1)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_a_text(server: Server, encoding: Any) -> None:
    """Without a format the client asks for base64 and decodes it itself."""
    answer = embed(server, "abc", **({"encoding_format": encoding} if encoding else {}))
    found: Any = answer.data[0].embedding
    if encoding == "base64":
        found = np.frombuffer(base64.b64decode(found), "<f4")
    assert found == pytest.approx(fake([256, *b"abc"]), abs=1e-6)
    assert answer.object == "list" and answer.data[0].index == 0 and answer.model == "fake:1"
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["ab", "c"], [[256, 97, 98], [256, 99]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9], [1, 2, 3]], [[7, 8], [9], [1, 2, 3]]),
    ],
)
def test_forms_of_input_keep_their_order(server: Server, given: Any, expected: list[list[int]]) -> None:
    answer = embed(server, given)
    assert [entry.index for entry in answer.data] == list(range(len(expected)))
    for entry, ids in zip(answer.data, expected, strict=True):
        assert entry.embedding == pytest.approx(fake(ids), abs=1e-6)
    assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_dimensions_are_the_first_ones_scaled_again(server: Server) -> None:
    found = embed(server, [3, 4, 5], dimensions=2).data[0].embedding
    assert found == pytest.approx(unit(3, 3), abs=1e-6)


def test_our_own_fields(server: Server) -> None:
    raw = embed(server, [3, 4, 5], extra_body={"normalize": False, "pooling": "mean"}).data[0].embedding
    assert raw == pytest.approx([3, 3, 5, 2])
    plain = embed(server, "abc", extra_body={"add_special_tokens": False}).usage.prompt_tokens
    cut = embed(server, "abcdef", extra_body={"truncate_prompt_tokens": 2}).data[0].embedding
    assert plain == 3 and cut == pytest.approx(fake([*b"ef"]), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "empty prompt"),
        ({"input": ""}, None, None),
        ({"input": [[]]}, "input", "empty prompt"),
        ({"input": [1, "a"]}, "input", "input must be text"),
        ({"input": [999]}, "input", "token id 999 is out of the vocabulary"),
        ({"input": "a" * 5000}, "input", "context length is 4096"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "dimensions": 5}, "dimensions", "from 1 to 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to 4"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "cls"}, "pooling", "'last' or 'mean'"),
        ({"input": "a", "priority": 2}, "priority", "from 0 to 1"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ],
)
def test_mistakes(server: Server, fields: dict[str, Any], param: str | None, message: str | None) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "fake:1", **fields}, timeout=20)
    if message is None:  # the tokenizer adds BOS, so an empty text has a token
        assert answer.json()["usage"]["prompt_tokens"] == 1
        return
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


def test_another_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.embeddings.create(model="other", input="a")


def test_faults_and_a_full_queue(folder: Path) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, max_queued_requests=3) as server:
        with pytest.raises(openai.RateLimitError):
            embed(server, ["a", "b", "c", "d"])
        loop.fault = "the row has failed"
        with pytest.raises(openai.InternalServerError, match="the row has failed"):
            embed(server, ["a", "b"])
        loop.fault = ""
        assert len(embed(server, ["a", "b"]).data) == 2


def test_a_server_of_embeddings_only(folder: Path) -> None:
    with running(folder, apis=Apis(embeddings_only=True, embedding_pooling="mean")) as server:
        found = embed(server, [3, 4, 5], extra_body={"normalize": False}).data[0].embedding
        assert found == pytest.approx([3, 3, 5, 2])
        for path in ("chat/completions", "completions", "responses", "messages"):
            assert httpx.post(f"{server.url}/v1/{path}", json={"model": "fake:1"}).status_code == 404
        assert server.client.models.list().data[0].id == "fake:1"
