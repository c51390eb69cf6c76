"""Steps as a CUDA graph holds them, run without one, and steps that the device has no memory for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.rank import Rank
from headrace.engine.rescue import NO_MEMORY
from headrace.seam import SectionResult, ints
from headrace.types import Sampling
from tests.engine.driver import Driver, open_rank
from tests.kits.graphs import use_pools
from tests.twin.harness import VOCAB, tiny_gemma3, tiny_llama

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, top_p=0.8, seed=3),
    Sampling(temperature=1.5, top_k=7, seed=4, repetition_penalty=1.4, frequency_penalty=0.5),
    Sampling(logprobs=2, logit_bias={7: 2.5}, bad_words=((9,),)),
]


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rank(folder: Path) -> Iterator[Rank]:
    opened = open_rank(folder)
    yield opened
    opened.close()


def begun(rank: Rank) -> Driver:
    """Four slots with prompts of their own, each with its first token."""
    rng, driver = random.Random(2), Driver(rank)
    for slot, sampling in enumerate(SAMPLINGS):
        prompt = [rng.randrange(VOCAB) for _ in range(3 + slot)]
        driver.begin(slot, sampling=sampling, prompt_len=len(prompt), history=ints(prompt), max_len=12 + slot)
        driver.rows({slot: prompt})
    return driver


def seen(result: SectionResult) -> tuple[object, ...]:
    logprobs = {row: (found.ids.tolist(), found.values.round(4).tolist()) for row, found in result.logprobs.items()}
    return result.num_accepted.tolist(), result.tokens.tolist(), logprobs, result.errors


def test_captured_steps_equal_the_others(folder: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled, with rules, with log-probabilities; some sequences end on the way."""
    expected = [seen(begun_driver.rows(dict.fromkeys(range(4)))) for begun_driver in [begun(rank)] for _ in range(9)]
    pools = use_pools(monkeypatch)
    monkeypatch.setattr(Rank, "_capture_sizes", lambda _: [4, 8])
    monkeypatch.setattr(Rank, "_token_sizes", lambda _: ())
    other = open_rank(folder)
    driver = begun(other)
    found = [seen(driver.rows(dict.fromkeys(range(4)))) for _ in range(9)]
    other.close()
    assert found == expected and sum(graph.num_replays for graph in pools[0].graphs) == 9
    assert expected[0][0] == [1] * 4 and 0 in expected[-1][0] and expected[0][2]  # type: ignore[operator]


def out_of_memory(rank: Rank, monkeypatch: pytest.MonkeyPatch, *, most: int, never: int = -1) -> list[int]:
    """Products with the head fail for more than `most` rows, and where slot `never` takes part. -> tries"""
    tries: list[int] = []
    logits_of, queue = rank.runner.logits, rank.stepper.queue
    current: list[int] = []

    def queued(section):  # type: ignore[no-untyped-def]
        current[:] = section.slot.tolist()
        return queue(section)

    def logits(hidden: Tensor) -> Tensor:
        tries.append(len(hidden))
        if len(hidden) > most or never in current:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits_of(hidden)

    monkeypatch.setattr(rank.stepper, "queue", queued)
    monkeypatch.setattr(rank.runner, "logits", logits)
    return tries


def test_a_step_too_large_runs_in_halves(folder: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [seen(driver.rows(dict.fromkeys(range(4)))) for driver in [begun(rank)] for _ in range(3)]
    other = open_rank(folder)
    driver = begun(other)
    tries = out_of_memory(other, monkeypatch, most=2)
    found = [seen(driver.rows(dict.fromkeys(range(4)))) for _ in range(3)]
    other.close()
    assert found == expected and tries[:4] == [4, 4, 2, 2]


def test_only_what_never_fits_fails(folder: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = seen(begun(rank).rows(dict.fromkeys(range(4))))
    other = open_rank(folder)
    driver = begun(other)
    with monkeypatch.context() as patched:
        out_of_memory(other, patched, most=4, never=1)
        found = driver.rows(dict.fromkeys(range(4)))
    assert found.errors == {1: NO_MEMORY} and found.num_accepted.tolist() == [1, 0, 1, 1]
    tokens = expected[1]
    assert found.tokens.tolist() == [*tokens[:1], *tokens[2:]]  # type: ignore[index]
    after = driver.rows({0: None, 2: None, 3: None})
    other.close()
    assert after.num_accepted.tolist() == [1, 1, 1]
