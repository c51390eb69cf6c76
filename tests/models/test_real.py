"""The two real models against transformers, both from the same GGUF files in float32."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from headrace.hub.source import ModelSource, resolve_model
from tests.kits.model import Case, Row, Sequences, assert_close, greedy, load_case

pytestmark = pytest.mark.slow

BLOCK_SIZE = 32
KEPT = 8
"""Positions compared of a prompt: all of 512 by a vocabulary of 262,144 would be half a gibibyte of logits, twice."""
REAL_TOLERANCE = 5e-4
"""Logits here reach 38. On 69 tokens of SmolLM2, transformers in float32 is 2e-4 from itself in float64, ours 4e-4, and
the two 2.2e-4 from each other: the float32 sums of 30 layers in another order."""


def load_oracle(source: ModelSource) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        os.fspath(source.path.parent),
        gguf_file=source.path.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def case(request: pytest.FixtureRequest) -> Case:
    torch.set_num_threads(1)
    source = resolve_model(request.param)
    return load_case(source, load_oracle(source))


def text(case: Case, length: int) -> list[int]:
    """Token ids that are spread over the vocabulary; the first is what the model's texts begin with."""
    first = case.oracle.config.bos_token_id or 1
    return [first] + [(7919 * (i + 3)) % 40_000 for i in range(length - 1)]


def edges(case: Case) -> list[int]:
    lengths = [1, BLOCK_SIZE - 1, BLOCK_SIZE + 1]
    return lengths if case.window is None else [*lengths, case.window - 1, case.window, case.window + 1]


def test_prefill(case: Case) -> None:
    for length in edges(case):
        ids = text(case, length)
        (logits,) = Sequences(case.model, block_size=BLOCK_SIZE).step([(Row(), ids)], keep=KEPT)
        assert_close(logits, case.logits(ids, keep=KEPT), f"prompt of {length} tokens", tolerance=REAL_TOLERANCE)


def test_chunks_and_neighbours(case: Case) -> None:
    ids, other = text(case, 2 * BLOCK_SIZE + 5), text(case, BLOCK_SIZE)
    sequences, row = Sequences(case.model, block_size=BLOCK_SIZE), Row()
    parts = [sequences.step([(Row(), other), (row, ids[at : at + 33])])[1] for at in range(0, len(ids), 33)]
    assert_close(torch.cat(parts), case.logits(ids), "chunks of 33 tokens", tolerance=REAL_TOLERANCE)


def test_greedy(case: Case) -> None:
    for length in (9, BLOCK_SIZE):
        ids = text(case, length)
        assert greedy(case.model, ids, 24, block_size=BLOCK_SIZE) == case.greedy(ids, 24)


def test_greedy_across_the_window(case: Case) -> None:
    if case.window is None:
        pytest.skip("no layer has a window")
    ids = text(case, case.window - 10)
    assert greedy(case.model, ids, 20, block_size=BLOCK_SIZE) == case.greedy(ids, 20)
