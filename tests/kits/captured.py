"""The whole engine over a tiny checkpoint: its answers are those of transformers, captured steps or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.rank import Rank
from tests.kits.model import BLOCK_SIZE, TOLERANCE, Case, edge_lengths, prompt
from tests.twin.harness import open_runtime, request, run, tokens_of

GRAPHS: dict[str, Any] = {
    "cuda_graph_config": {"batch_sizes": [1, 2, 4, 8], "enable_padding": True},
    "prefill_capture_num_tokens": [8, 32],
    "fast_start": True,
}
NUM_TOKENS = 10


def check_engine(case: Case) -> None:
    """Prompts that arrive one after another, so that whole prompts, chunks and generation rows share steps."""
    prompts = [prompt(length, seed=7) for length in (*edge_lengths(case), 2 * BLOCK_SIZE, 3)]
    expected = [case.greedy(ids, NUM_TOKENS) for ids in prompts]
    for settings in (GRAPHS, {"cuda_graph_config": None}):
        found, num_graphs = answers(case.source.path, prompts, **settings)
        for ids, one, other in zip(prompts, expected, found, strict=True):
            _check_tokens(case, ids, one, other, f"with {settings}")
        is_captured = settings is GRAPHS and case.model.is_capturable
        assert (num_graphs > 0) == is_captured, f"{num_graphs} captured steps with {settings}"


def _check_tokens(case: Case, ids: Sequence[int], expected: list[int], found: list[int], what: str) -> None:
    """Equal up to a place where the oracle's two logits are as close as logits may differ."""
    assert len(found) == len(expected), what
    at = next((at for at, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other), None)
    if at is not None:
        logits = case.logits([*ids, *expected[:at]])[-1]
        gap = float(logits[expected[at]] - logits[found[at]])
        assert gap < TOLERANCE, f"{found} instead of {expected} {what}: at {at} the logits are {gap:.2e} apart"


def answers(folder: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> tuple[list[list[int]], int]:
    """-> (greedy tokens by prompt, how many sizes of generation steps were captured)"""
    core = open_runtime(folder, max_num_tokens=24, **settings)
    try:
        some = [request(at, ids, max_tokens=NUM_TOKENS) for at, ids in enumerate(prompts)]
        deltas = run(core, some, stagger=1)
        assert isinstance(core.engine, Engine) and isinstance(core.engine._rank, Rank)
        graphs = core.engine._rank.stepper.graphs
        return [tokens_of(deltas[each.id]) for each in some], 0 if graphs is None else len(graphs._graphs)
    finally:
        core.engine.close()
