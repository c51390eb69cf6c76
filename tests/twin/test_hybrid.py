"""Models with recurrent states through the whole runtime: what a request gets is what transformers computes, however it
was chunked, batched, resumed at a snapshot, preempted, or brought back from a lower tier. Float32 on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.runtime.core import Core
from tests.kits.model import save_tiny
from tests.kits.tiny import VOCAB_SIZE
from tests.kits.tiny_kimi_k3 import save_kimi_k3
from tests.twin import harness
from tests.twin.harness import BLOCK, drawn, greedy, open_runtime, request, run, tokens_of

INTERVAL = 2 * BLOCK
"""Tokens between snapshots."""
COUNT = 6
"""Tokens of an answer."""
LENGTHS = (1, BLOCK + 1, INTERVAL, INTERVAL + 1, 3 * INTERVAL + 3)
KIMI_K3 = "kimi_k3"
"""Of no transformers: its oracle is a reference of our own."""
STATES = {"mamba_state_config": {"periodic_snapshot_interval": INTERVAL}}
TYPES = ("kimi_linear", "qwen3_next", "nemotron_h", "mamba2", "falcon_h1", KIMI_K3)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in TYPES]


PARAMS = SamplingParams(max_tokens=COUNT, detokenize=False, ignore_eos=True, end_id=-1)


def draw(seed: object, length: int) -> list[int]:
    return drawn(seed, length, vocab_size=VOCAB_SIZE)


def prompts() -> list[list[int]]:
    """Some alone, some that leave a shared beginning at a snapshot, behind it and within its block."""
    shared = draw("shared", 40)
    alone = [draw(length, length) for length in LENGTHS]
    return alone + [shared[:at] + draw(at, 6) for at in (INTERVAL + BLOCK, 3 * INTERVAL - 1)]


class Model(NamedTuple):
    folder: Path
    wanted: list[list[int]]
    """transformers' greedy answers to `prompts`."""


@pytest.fixture(scope="module", params=["qwen3_5_text", *SLOW])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hybrid")
    oracle = save_kimi_k3(folder) if request.param == KIMI_K3 else save_tiny(folder, request.param)
    return Model(folder, [greedy(oracle, ids, COUNT) for ids in prompts()])


def start(opened: list[Core], model: Model, *, cache: dict[str, Any] | None = None, **changes: Any) -> Core:
    core = open_runtime(model.folder, kv_cache_config={**STATES, **(cache or {})}, **changes)
    opened.append(core)
    return core


ask = partial(harness.ask, prompts=prompts(), max_tokens=COUNT)


def at_snapshot(length: int) -> int:
    """The last one that leaves a token of a prompt to compute."""
    return (length - 1) // INTERVAL * INTERVAL


CHUNKS = [
    (1, True),
    (3, False),
    (BLOCK, True),
    (BLOCK + 1, True),
    (512, False),
    pytest.param(1, False, marks=pytest.mark.slow),
    pytest.param(3, True, marks=pytest.mark.slow),
    pytest.param(BLOCK, False, marks=pytest.mark.slow),
    pytest.param(BLOCK + 1, False, marks=pytest.mark.slow),
    pytest.param(512, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("chunk", "overlap"), CHUNKS)
def test_chunks_and_overlap(model: Model, opened: list[Core], chunk: int, overlap: bool) -> None:
    core = start(opened, model, max_num_tokens=chunk, disable_overlap_scheduler=not overlap)
    answers, cached = ask(core)
    assert answers == model.wanted
    if chunk == 512 and not overlap:
        assert cached[: len(LENGTHS)] == [0] * len(LENGTHS)


def test_neighbours_come_and_go(model: Model, opened: list[Core]) -> None:
    assert ask(start(opened, model), stagger=2)[0] == model.wanted


def test_prefixes_are_resumed_at_snapshots(model: Model, opened: list[Core]) -> None:
    core = start(opened, model)
    cold, _ = ask(core)
    warm, cached = ask(core, turn=1)
    assert cold == warm == model.wanted
    assert cached == [at_snapshot(len(ids)) for ids in prompts()]


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({"periodic_snapshot_interval": 0, "additional_snapshot_offsets_from_start": [12]}, [12, 12]),
        ({"periodic_snapshot_interval": 0, "additional_snapshot_offsets_from_end": [BLOCK]}, [32, 20]),
        ({"periodic_snapshot_interval": 16, "additional_snapshot_offsets_from_end": [BLOCK]}, [32, 20]),
        ({"periodic_snapshot_interval": 0}, [0, 0]),
    ],
)
def test_where_snapshots_are_kept(model: Model, opened: list[Core], config: dict[str, Any], places: list[int]) -> None:
    core = start(opened, model, cache={"mamba_state_config": config})
    some = [request(at, draw("places", length), max_tokens=2) for at, length in enumerate((39, 27))]
    first = [run(core, [each])[each.id] for each in some[:1]]
    run(core, some[1:])
    again = [request(10 + at, each.prompt, max_tokens=2) for at, each in enumerate(some)]
    warm = run(core, again)
    assert tokens_of(first[0]) == tokens_of(warm[10])
    assert [warm[each.id][-1].cached_tokens for each in again] == places


def test_a_prompt_that_leaves_a_known_path_keeps_its_state_there(model: Model, opened: list[Core]) -> None:
    config = {"periodic_snapshot_interval": 0, "enable_branch_snapshot": True}
    core = start(opened, model, cache={"mamba_state_config": config})
    shared = draw("branch", 5 * BLOCK)
    texts = [shared + draw(at, 9) for at in range(3)]
    cached = [run(core, [request(at, ids)])[at][-1].cached_tokens for at, ids in enumerate(texts)]
    # The second one left the path and saved its state, the third goes on from it. Without attention there is no path.
    has_path = not all(group.is_recurrent for group in core.facts.groups)
    assert cached == [0, 0, len(shared) if has_path else 0]


@pytest.mark.parametrize("policy", ["MAX_UTILIZATION", pytest.param("GUARANTEED_NO_EVICT", marks=pytest.mark.slow)])
def test_tiny_pools(model: Model, opened: list[Core], policy: str, preempted: list[Any]) -> None:
    core = start(
        opened,
        model,
        cache={"max_tokens": 11 * BLOCK},
        scheduler_config={"capacity_scheduler_policy": policy},
        max_batch_size=6,
    )
    assert ask(core)[0] == ask(core, turn=1)[0] == model.wanted
    # A state neither grows nor waits for blocks: without attention there is nothing to preempt for.
    grows = not all(group.is_recurrent for group in core.facts.groups)
    assert bool(preempted) == (grows and policy == "MAX_UTILIZATION")


def tiers(opened: list[Core], model: Model, cache: dict[str, Any]) -> Core:
    return start(opened, model, cache={"max_tokens": 15 * BLOCK, **cache}, max_batch_size=4)


def test_states_come_back_from_the_host(model: Model, opened: list[Core]) -> None:
    alone = tiers(opened, model, {})
    ask(alone)
    _, lost = ask(alone, turn=1)
    core = tiers(opened, model, {"host_cache_size": 400_000})
    assert ask(core)[0] == model.wanted
    again, cached = ask(core, turn=1)
    assert again == model.wanted
    assert cached == [at_snapshot(len(ids)) for ids in prompts()] and sum(lost) < sum(cached)
    stats = core.scheduler.sections[0].kv.stats
    assert stats.offload_bytes and stats.onboard_bytes and not stats.failed_transfers


def open_llm(model: Model, **cache: Any) -> LLM:
    return LLM(
        str(model.folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_tokens=16,
        max_batch_size=4,
        kv_cache_config={"max_tokens": 60 * BLOCK, "tokens_per_block": BLOCK, **STATES, **cache},
    )


def test_states_are_found_on_disk_after_a_restart(model: Model, tmp_path: Path) -> None:
    """What is kept at the end of one process is what the next one begins with."""
    disk = {"disk_cache_size": 2_000_000, "disk_cache_path": str(tmp_path)}
    for expected in ([0] * len(LENGTHS), [at_snapshot(length) for length in LENGTHS]):
        with open_llm(model, **disk) as llm:
            outputs = [llm.generate_async(ids, PARAMS).result(timeout=60) for ids in prompts()]
        assert [output.outputs[0].token_ids for output in outputs] == model.wanted
        assert [output.cached_tokens for output in outputs[: len(LENGTHS)]] == expected


def test_aborts_leave_the_others_alone(model: Model) -> None:
    """Through `LLM`, its threads and all: every second one is given up, some before they began."""
    long = SamplingParams(max_tokens=60, detokenize=False, ignore_eos=True, end_id=-1)
    with open_llm(model) as llm:
        for _ in range(2):
            doomed = [llm.generate_async(draw(("doomed", at), 30), long) for at in range(4)]
            kept = [llm.generate_async(ids, PARAMS) for ids in prompts()]
            for output in doomed:
                output.abort()
            assert [output.result(timeout=60).outputs[0].token_ids for output in kept] == model.wanted
            for output in doomed:
                output.result(timeout=60)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_states(model: Model, opened: list[Core], dtype: str) -> None:
    """They take less, and answers stay answers; `plan` and allocation agree in tests/engine/test_plan_agrees.py."""
    wide, narrow = (
        start(opened, model, cache={"mamba_ssm_cache_dtype": name}, disable_overlap_scheduler=True)
        for name in ("float32", dtype)
    )
    of_states = [next(group for group in core.facts.groups if group.is_recurrent) for core in (wide, narrow)]
    assert [group.dtype for group in of_states] == ["float32", dtype]
    assert of_states[1].state_bytes < of_states[0].state_bytes
    cold, _ = ask(narrow)
    warm, cached = ask(narrow, turn=1)
    assert [len(answer) for answer in cold] == [len(answer) for answer in warm] == [COUNT] * len(cold)
    assert max(cached) >= 3 * INTERVAL


@pytest.mark.slow
def test_two_ranks_with_a_host_tier(model: Model, opened: list[Core]) -> None:
    cache = {"max_tokens": 15 * BLOCK, "host_cache_size": 400_000}
    core = start(opened, model, cache=cache, max_batch_size=4, tensor_parallel_size=2)
    assert ask(core)[0] == model.wanted
    again, cached = ask(core, turn=1)
    assert again == model.wanted and cached == [at_snapshot(len(ids)) for ids in prompts()]
    assert core.scheduler.sections[0].kv.stats.onboard_bytes
