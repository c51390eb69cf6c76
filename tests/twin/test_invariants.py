"""Design section 4: what a request gets does not depend on how it was run. Float32 on the CPU: identical tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.core import Core
from headrace.types import BeamSearch, Request, Sampling
from tests.twin.harness import (
    BLOCK,
    VOCAB,
    open_runtime,
    request,
    run,
    tiny_gemma3,
    tiny_llama,
    tokens_of,
    transformers_greedy,
)

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5, 6, 7, 18, 3 * BLOCK + 1, 40)


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("tiny"))


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    fresh = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    return fresh + [shared[: 2 * BLOCK] + tail[:5] for tail in fresh[:4]]


def requests(**changes: Any) -> list[Request]:
    """Greedy and seeded random ones, side by side."""
    made: list[Request] = []
    for index, prompt in enumerate(prompts()):
        sampling = Sampling(temperature=0.9, top_p=0.9, seed=index) if index % 3 == 2 else Sampling()
        made.append(request(index, prompt, **{"sampling": sampling, **changes}))
    return made


@pytest.fixture(scope="module")
def solo(folder: Path) -> dict[int, list[int]]:
    """Each request alone, prompts in one piece, one plan at a time, nothing reused: the slow obvious way."""
    core = open_runtime(folder, disable_overlap_scheduler=True, kv_cache_config={"enable_block_reuse": False})
    try:
        return {each.id: tokens_of(run(core, [each])[each.id]) for each in requests()}
    finally:
        core.engine.close()


def check(core: Core, solo: dict[int, list[int]], *, stagger: int = 0) -> None:
    got = run(core, requests(), stagger=stagger)
    assert {key: tokens_of(deltas) for key, deltas in got.items()} == solo


def test_solo_equals_transformers(folder: Path, solo: dict[int, list[int]]) -> None:
    for each in requests():
        if each.sampling.temperature == 0.0:
            assert solo[each.id] == transformers_greedy(folder, each.prompt, 12), len(each.prompt)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK, BLOCK + 1, 512])
@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_and_overlap(
    folder: Path, solo: dict[int, list[int]], opened: list[Core], chunk: int, overlap: bool
) -> None:
    core = open_runtime(folder, max_num_tokens=chunk, disable_overlap_scheduler=not overlap)
    opened.append(core)
    check(core, solo)


def test_neighbours_come_and_go(folder: Path, solo: dict[int, list[int]], opened: list[Core]) -> None:
    opened.append(open_runtime(folder))
    check(opened[0], solo, stagger=2)


def test_prefix_hits_cold_and_warm(folder: Path, solo: dict[int, list[int]], opened: list[Core]) -> None:
    core = open_runtime(folder)
    opened.append(core)
    check(core, solo)
    warm = run(core, requests())
    assert {key: tokens_of(deltas) for key, deltas in warm.items()} == solo
    for each in requests():
        cached = warm[each.id][-1].cached_tokens
        assert cached <= len(each.prompt) - 1
        # Everything but the last token was computed before.
        assert cached == len(each.prompt) - 1, len(each.prompt)


@pytest.mark.parametrize("policy", ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"])
def test_tiny_pool(folder: Path, solo: dict[int, list[int]], opened: list[Core], policy: str) -> None:
    core = open_runtime(
        folder,
        kv_cache_config={"max_tokens": 15 * BLOCK},
        scheduler_config={"capacity_scheduler_policy": policy},
    )
    opened.append(core)
    check(core, solo)


def test_logprobs_cold_equal_warm(folder: Path, opened: list[Core]) -> None:
    core = open_runtime(folder)
    opened.append(core)
    asked = requests(sampling=Sampling(logprobs=3))[:8]
    cold, warm = run(core, asked), run(core, asked)
    for each in asked:
        left = [entry for delta in cold[each.id] for entry in delta.logprobs]
        right = [entry for delta in warm[each.id] for entry in delta.logprobs]
        assert len(left) == 12 and [e.ids for e in left] == [e.ids for e in right]
        for a, b in zip(left, right, strict=True):
            assert a.values == pytest.approx(b.values, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 512])
def test_prompt_logprobs_any_chunk(folder: Path, opened: list[Core], chunk: int) -> None:
    whole, cut = open_runtime(folder), open_runtime(folder, max_num_tokens=chunk)
    opened.extend([whole, cut])
    asked = requests(sampling=Sampling(prompt_logprobs=2))[:8]
    run(cut, asked)  # warm the cache: the prompt must be computed all the same
    first, second = run(whole, asked), run(cut, asked)
    for each in asked:
        left, right = first[each.id][0].prompt_logprobs, second[each.id][0].prompt_logprobs
        assert left is not None and right is not None
        assert len(left) == len(right) == len(each.prompt) and left[0] is None
        for a, b in zip(left[1:], right[1:], strict=True):
            assert a is not None and b is not None
            assert a.ids == b.ids and a.values == pytest.approx(b.values, abs=1e-5)


def test_beam_search_equals_transformers(folder: Path, opened: list[Core]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    core = open_runtime(folder, max_beam_width=3)
    opened.append(core)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    search = BeamSearch(width=3, num_return=3, length_penalty=1.0)
    asked = [request(index, prompt, beam=search, max_tokens=8) for index, prompt in enumerate(prompts()[:6])]
    got = run(core, asked)
    for each in asked:
        expected = model.generate(
            torch.tensor([each.prompt]),
            attention_mask=torch.ones((1, len(each.prompt)), dtype=torch.long),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=8,
            do_sample=False,
            early_stopping=True,
            length_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )[:, len(each.prompt) :].tolist()
        beams = got[each.id][-1].beams
        assert beams is not None and [beam.tokens for beam in beams] == expected
