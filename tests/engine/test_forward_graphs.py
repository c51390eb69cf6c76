"""Padded passes, without CUDA."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.attention._layout import BlockLayout
from headrace.engine import forward_graphs
from headrace.engine.engine import Engine
from headrace.engine.forward_graphs import ForwardGraphs
from headrace.engine.rank import Rank
from headrace.types import Request, Sampling
from tests.kits.graphs import Pool, use_pools
from tests.twin.harness import VOCAB, open_runtime, request, run, tiny_gemma3, tiny_llama, tokens_of


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Those of the ranks that open, which capture whatever they can."""
    monkeypatch.setattr(forward_graphs, "CAPTURED_AT", 1)
    monkeypatch.setattr(Rank, "_capture_sizes", lambda _: [1, 2, 4, 8])
    monkeypatch.setattr(Rank, "_token_sizes", lambda _: [8, 32])
    return use_pools(monkeypatch)


def requests() -> list[Request]:
    rng = random.Random(5)
    made: list[Request] = []
    for index in range(14):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 4, 8, 17, 40]))]
        drawn = Sampling(temperature=0.8, top_p=0.9, seed=index, min_p=0.01)
        ruled = Sampling(repetition_penalty=1.3, logprobs=2)
        sampling = {1: drawn, 2: ruled}.get(index % 4, Sampling())
        made.append(request(index, prompt, sampling=sampling, max_tokens=rng.randint(1, 12)))
    return made


def generate(folder: Path, **changes: Any) -> dict[int, list[int]]:
    core = open_runtime(folder, **changes)
    try:
        return {key: tokens_of(deltas) for key, deltas in run(core, requests(), stagger=1).items()}
    finally:
        core.engine.close()


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
@pytest.mark.parametrize("overlap", [True, False])
def test_padded_passes_equal_the_others(
    tmp_path: Path, make: Callable[[Path], Path], overlap: bool, request: pytest.FixtureRequest
) -> None:
    """Prompts whole and in chunks beside generation rows, drawn, ruled and greedy."""
    folder = make(tmp_path)
    changes: dict[str, Any] = {"disable_overlap_scheduler": not overlap, "max_num_tokens": 24}
    expected = generate(folder, **changes)
    pools = request.getfixturevalue("pools")
    assert generate(folder, **changes) == expected
    (pool,) = pools
    assert sum(graph.num_replays > 0 for graph in pool.graphs) > 5


def test_what_is_not_captured(tmp_path: Path, pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than all sizes, and shapes that have not come often enough."""
    folder = tiny_llama(tmp_path)
    found: list[bool] = []
    usual = ForwardGraphs.run

    def run_or_not(self: ForwardGraphs, section: Any) -> Any:
        result = usual(self, section)
        found.append(result is not None)
        return result

    monkeypatch.setattr(ForwardGraphs, "run", run_or_not)
    monkeypatch.setattr(forward_graphs, "CAPTURED_AT", 2)
    core = open_runtime(folder)
    captured = len(pools[0].graphs)
    for index, length in enumerate([33, 20, 20, 5]):
        run(core, [request(index, list(range(length)), max_tokens=1)], stagger=0)
    core.engine.close()
    assert found == [False, True, True, True] and len(pools[0].graphs) == captured, (
        "a prompt alone is captured at start"
    )


def test_steps_that_want_lengths_are_not_captured(
    tmp_path: Path, pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long prompts of latent attention: neither at start nor when they come."""
    asked: list[Any] = []

    def of_long_prompts(_: Any, rows: Any, _spec: Any) -> bool:
        asked.append(tuple(rows))
        return sum(count for count, _ in rows) > 8

    monkeypatch.setattr(BlockLayout, "wants_lengths", of_long_prompts)
    core = open_runtime(tiny_llama(tmp_path))
    for index, ids in enumerate([range(20), range(9, 4, -1)]):
        run(core, [request(index, list(ids), max_tokens=1)], stagger=0)
    assert isinstance(core.engine, Engine) and isinstance(core.engine._rank, Rank)
    forwards = core.engine._rank.stepper.forwards
    assert forwards is not None and {shape.num_tokens for shape in forwards._graphs} == {8}
    core.engine.close()
    assert {((8, 8),), ((32, 32),), ((20, 20),), ((5, 5),)} <= set(asked)
