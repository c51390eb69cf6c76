"""Embeddings equal the hidden states of transformers, in any chunks, among generation, and on two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.llm import LLM, RequestError
from headrace.types import Delta
from tests.twin.harness import VOCAB, open_runtime, request, run, tiny_gemma3, tiny_llama, tokens_of

DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(VOCAB) for _ in range(length)] for length in (1, 4, 5, 30, 61)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hidden(model: Path) -> list[NDArray[np.float32]]:
    """By prompt, [tokens, hidden] after the last norm, as transformers computes them."""
    from transformers import AutoModel

    oracle: Any = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [oracle(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


def embeddings(deltas: dict[int, list[Delta]], count: int) -> list[NDArray[np.float32]]:
    for each in deltas.values():
        assert each[-1].finish == "stop" and not each[-1].error and not tokens_of(each)
    return [np.frombuffer(deltas[at][-1].embedding, "<f4") for at in range(count)]


@pytest.mark.parametrize("max_num_tokens", [512, 7])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_equal_transformers(model: Path, hidden: list[NDArray[np.float32]], pooling: str, max_num_tokens: int) -> None:
    core = open_runtime(model, max_num_tokens=max_num_tokens, max_batch_size=4)
    try:
        found = embeddings(run(core, [request(at, ids, pooling=pooling) for at, ids in enumerate(PROMPTS)]), 5)
        again = embeddings(run(core, [request(at, ids, pooling=pooling) for at, ids in enumerate(PROMPTS)]), 5)
    finally:
        core.close()
    for got, warm, states in zip(found, again, hidden, strict=True):
        expected = states[-1] if pooling == "last" else states.mean(0)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(got, warm, atol=1e-6)


def test_neighbours_that_generate_are_not_disturbed(model: Path, hidden: list[NDArray[np.float32]]) -> None:
    core = open_runtime(model, max_num_tokens=16)
    try:
        alone = tokens_of(run(core, [request(9, PROMPTS[3], max_tokens=20)])[9])
        mixed = [
            request(10, PROMPTS[3], max_tokens=20),
            *(request(at, ids, pooling="mean") for at, ids in enumerate(PROMPTS)),
        ]
        deltas = run(core, mixed, stagger=2)
        assert tokens_of(deltas.pop(10)) == alone
    finally:
        core.close()
    for got, states in zip(embeddings(deltas, 5), hidden, strict=True):
        np.testing.assert_allclose(got, states.mean(0), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_two_ranks_give_the_same(tmp_path: Path) -> None:
    found: list[list[NDArray[np.float32]]] = []
    folder = tiny_llama(tmp_path)
    for size in (1, 2):
        core = open_runtime(folder, tensor_parallel_size=size)
        try:
            found.append(embeddings(run(core, [request(at, ids, pooling="mean") for at, ids in enumerate(PROMPTS)]), 5))
        finally:
            core.engine.close()
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_offline(model: Path, hidden: list[NDArray[np.float32]]) -> None:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "engine_threads": 1, "max_num_tokens": 16}
    with LLM(model, **settings, kv_cache_config={"max_tokens": 512}) as llm:
        rows = llm.embed(PROMPTS, pooling="mean", normalize=False)
        one = llm.embed(PROMPTS[4], dimensions=8)
        assert llm.embed([]).shape == (0, 32)
        with pytest.raises(RequestError, match="from 1 to 32"):
            llm.embed(PROMPTS[0], dimensions=33)
        with pytest.raises(RequestError, match="pooling must be"):
            llm.embed(PROMPTS[0], pooling="cls")
    np.testing.assert_allclose(rows, [states.mean(0) for states in hidden], atol=TOLERANCE, rtol=TOLERANCE)
    expected = hidden[4][-1, :8]
    np.testing.assert_allclose(one, expected / np.linalg.norm(expected), atol=TOLERANCE)
