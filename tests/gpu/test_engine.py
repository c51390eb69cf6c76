"""The engine on a GPU: captured steps equal eager ones, and nothing in the loop waits for the device."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.types import Request, Sampling
from tests.engine.driver import Driver, open_rank
from tests.kits.model import save_tiny
from tests.twin.harness import (
    VOCAB,
    open_runtime,
    request,
    run,
    tiny_gemma3,
    tiny_llama,
    tokens_of,
    transformers_greedy,
)
from tests.twin.test_deterministic import MXFP4_EXPERTS, check_bits

pytestmark = pytest.mark.gpu

GRAPHS: dict[str, Any] = {"batch_sizes": [1, 2, 4, 8, 16], "enable_padding": True}


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("tiny"))


def requests(*, seeded: bool = True) -> list[Request]:
    rng = random.Random(3)
    made: list[Request] = []
    for index in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 4, 5, 17, 40]))]
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=index) if seeded and index % 4 == 3 else Sampling()
        made.append(request(index, prompt, sampling=sampling, max_tokens=rng.randint(1, 30)))
    return made


def generate(folder: Path, asked: list[Request], *, stagger: int, **changes: Any) -> dict[int, list[int]]:
    core = open_runtime(folder, **changes)
    try:
        return {key: tokens_of(deltas) for key, deltas in run(core, asked, stagger=stagger).items()}
    finally:
        core.engine.close()


def test_plain_attention_on_a_gpu(folder: Path) -> None:
    """It reads lengths on the host, so its steps aren't captured, whatever the settings ask for."""
    asked = requests(seeded=False)[:6]
    plain = generate(folder, asked, stagger=1, attn_backend="VANILLA", cuda_graph_config=GRAPHS)
    assert plain == generate(folder, asked, stagger=1, cuda_graph_config=GRAPHS)


@pytest.mark.parametrize("stagger", [0, 2])
def test_graphs_equal_eager_steps(folder: Path, stagger: int) -> None:
    """Float32 on tiny models: the padded size changes no bit that decides a token."""
    captured = generate(folder, requests(), stagger=stagger, cuda_graph_config=GRAPHS)
    eager = generate(folder, requests(), stagger=stagger, cuda_graph_config=None)
    assert captured == eager


def test_greedy_equals_transformers(folder: Path) -> None:
    asked = requests(seeded=False)[:6]
    found = generate(folder, asked, stagger=0, cuda_graph_config=GRAPHS)
    for each in asked:
        assert found[each.id] == transformers_greedy(folder, each.prompt, each.max_tokens)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Implicit waits for the device are errors."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [GRAPHS, None], ids=["graphs", "eager"])
def test_queueing_never_waits(folder: Path, graphs: Any) -> None:
    rank = open_rank(folder, cuda_graph_config=graphs)
    driver = Driver(rank)
    driver.begin(0)
    driver.rows({0: [1, 2, 3]})
    driver.begin(1, stop_ids=(5, 6))
    driver.rows({1: [4] * 9, 0: None})
    driver.rows({0: None, 1: None})  # compiles, and captures
    with strict():
        driver.begin(2)
        driver.rows({2: [7, 8], 0: None, 1: None})
        for _ in range(3):
            driver.rows({0: None, 1: None})
    rank.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [None, GRAPHS])
def test_deterministic_bits_are_a_requests_own(folder: Path, dtype: str, graphs: dict[str, Any] | None) -> None:
    check_bits(folder, dtype, cuda_graph_config=graphs)


def test_deterministic_experts(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    check_bits(tmp_path, "bfloat16")


def test_deterministic_packed_experts(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=64)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4_EXPERTS}))
    check_bits(tmp_path, "bfloat16", load_format="dummy")
