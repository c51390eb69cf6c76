"""Models whose layers keep parts of several reaches, through the whole runtime: what a request gets is what
transformers computes, however it was chunked, batched, resumed behind a reused prefix, preempted, or brought back from
a lower tier.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headrace.runtime.core import Core
from tests.kits.model import save_tiny
from tests.kits.tiny import VOCAB_SIZE
from tests.twin import harness
from tests.twin.harness import BLOCK, drawn, greedy, open_runtime

COUNT = 6
"""Tokens of an answer."""
LENGTHS = (1, BLOCK + 1, 3 * BLOCK, 37)
CACHES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "glm5_next_text": {"mamba_state_config": {"periodic_snapshot_interval": 2 * BLOCK}},
}
"""What `kv_cache_config` needs so that prefixes are reused."""


def draw(seed: object, length: int) -> list[int]:
    return drawn(seed, length, vocab_size=VOCAB_SIZE)


def prompts() -> list[list[int]]:
    """Some alone, some that leave a shared beginning at a block's end and within a block."""
    shared = draw("shared", 40)
    return [draw(length, length) for length in LENGTHS] + [shared[:at] + draw(at, 5) for at in (24, 29, 35)]


class Model(NamedTuple):
    name: str
    folder: Path
    wanted: list[list[int]]
    """transformers' greedy answers to `prompts`."""


@pytest.fixture(scope="module", params=list(CACHES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("parted")
    oracle = save_tiny(folder, request.param)
    return Model(request.param, folder, [greedy(oracle, ids, COUNT) for ids in prompts()])


def start(opened: list[Core], model: Model, *, cache: dict[str, Any] | None = None, **changes: Any) -> Core:
    core = open_runtime(model.folder, kv_cache_config={**CACHES[model.name], **(cache or {})}, **changes)
    opened.append(core)
    return core


ask = partial(harness.ask, prompts=prompts(), max_tokens=COUNT)


@pytest.mark.parametrize(
    ("chunk", "overlap"),
    [(3, True), (BLOCK + 1, False), (512, True), pytest.param(1, False, marks=pytest.mark.slow)],
)
def test_chunks_and_overlap(model: Model, opened: list[Core], chunk: int, overlap: bool) -> None:
    core = start(opened, model, max_num_tokens=chunk, disable_overlap_scheduler=not overlap)
    answers, _ = ask(core)
    assert answers == model.wanted


def test_a_reused_prefix(model: Model, opened: list[Core]) -> None:
    """Whole blocks, and a part of one where there are no states."""
    core = start(opened, model)
    assert ask(core)[0] == model.wanted
    answers, cached = ask(core, turn=1, stagger=1)
    assert answers == model.wanted
    assert cached[3] > 20 and min(cached[4:]) >= 16, cached


def test_tight_pools_preempt(model: Model, opened: list[Core], preempted: list[Any]) -> None:
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    core = start(opened, model, cache={"max_tokens": 17 * BLOCK}, scheduler_config=policy, max_batch_size=6)
    assert ask(core)[0] == ask(core, turn=1)[0] == model.wanted
    assert preempted


def test_blocks_from_the_host(model: Model, opened: list[Core]) -> None:
    core = start(opened, model, cache={"max_tokens": 15 * BLOCK, "host_cache_size": 4 << 20})
    assert ask(core)[0] == model.wanted
    assert ask(core, turn=1)[0] == model.wanted
    stats = core.scheduler.sections[0].kv.stats
    assert stats.offload_bytes and stats.onboard_bytes and not stats.failed_transfers
