"""A cap on the reasoning through the real runtime: so many tokens, then the marker, then what the model makes of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.runtime.core import Core
from headrace.types import Delta, Request, Sampling, ThinkingCap

from .harness import open_runtime, request, run, tiny_llama, tokens_of

END = (90, 91, 92)
PROMPT = [5, 9, 11, 30, 31, 32, 33, 34, 35]
NUM = 16
HOT = Sampling(temperature=1.0, seed=7, presence_penalty=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    core = open_runtime(folder, disable_overlap_scheduler=True, kv_cache_config={"enable_block_reuse": False})
    yield core
    core.engine.close()


def capped(max_tokens: int, **changes: Any) -> ThinkingCap:
    fields = {"ends": (tuple((token,) for token in END),), "is_open": True, **changes}
    return ThinkingCap(max_tokens=max_tokens, **fields)


def asked(request_id: int, cap: ThinkingCap | None, **changes: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": NUM, "thinking": cap, **changes}
    return request(request_id, [1 + request_id % 8, *PROMPT[: 2 + request_id % 8]], **fields)


@cache
def expected(plain: Core, key: int, budget: int) -> list[int]:
    """Greedy: what comes without a cap, cut, the marker, and what comes behind these."""
    one = asked(key, None)
    free = tokens_of(run(plain, [request(1000, one.prompt, max_tokens=NUM)])[1000])[:budget]
    assert not free or free[-1] not in END, "the marker must not come by itself here"
    given = [*free, *END]
    rest = run(plain, [request(1001, [*one.prompt, *given], max_tokens=NUM - len(given))])[1001]
    return [*given, *tokens_of(rest)]


def _tokens(got: dict[int, list[Delta]]) -> dict[int, list[int]]:
    return {key: tokens_of(deltas) for key, deltas in got.items()}


WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no_overlap": {"disable_overlap_scheduler": True},
    "chunked": {"enable_chunked_prefill": True, "max_num_tokens": 13, "max_batch_size": 8},
    "preempted": {
        "kv_cache_config": {"max_tokens": 96},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_exactly_so_many_tokens_and_the_marker(folder: Path, plain: Core, way: str) -> None:
    budgets = {0: 0, 1: 1, 2: 2, 3: 9}
    core = open_runtime(folder, **WAYS[way])
    try:
        some = [asked(key, capped(budget)) for key, budget in budgets.items()]
        beside = [asked(5, None), asked(6, capped(5), sampling=HOT), asked(14, capped(5), sampling=HOT, max_tokens=6)]
        got = _tokens(run(core, [*some, *beside], stagger=2))
        again = _tokens(run(core, some)) if way == "overlap" else {}  # their prompts are found in the cache
    finally:
        core.engine.close()
    for one in some:
        assert got[one.id] == expected(plain, one.id, budgets[one.id]), one.id
    assert got[5] == tokens_of(run(plain, [asked(5, None)])[5])
    assert tuple(got[6][5:8]) == END and got[6][:5] == got[14][:5] and got[14][5:] == [END[0]]
    assert all(got[key] == tokens for key, tokens in again.items())


def test_an_end_of_its_own_is_left_alone(folder: Path) -> None:
    """The model is made to write the marker; no second one comes. The begin is seen in the output, too."""
    mark = {END[0]: 60.0}
    core = open_runtime(folder)
    try:
        got = _tokens(run(core, [
            asked(0, capped(4, ends=(((END[0],),),)), sampling=Sampling(logit_bias=mark)),
            asked(1, capped(4, is_open=False, begin=((END[0],),)), sampling=Sampling(logit_bias=mark)),
            asked(2, capped(4, is_open=False, begin=((95,),))),
            asked(4, capped(3), stop_ids=(END[1],)),
        ]))  # fmt: skip
        bare = _tokens(run(core, [asked(2, None)]))
        (last,) = [
            deltas[-1] for deltas in run(core, [asked(3, capped(3), min_tokens=NUM, stop_ids=(END[1],))]).values()
        ]
    finally:
        core.engine.close()
    assert set(got[0]) == {END[0]}
    assert got[1][:7] == [END[0]] * 5 + [END[1], END[2]]  # the last token of the reasoning begins the marker
    assert got[2] == bare[2]
    assert last.finish == "error" and "no token is left" in last.error  # the marker is what must not come yet
    assert got[4][3:] == list(END[:2]), "a stop id ends the request, wherever it comes from"


def test_log_probabilities_are_the_models_own(folder: Path) -> None:
    core = open_runtime(folder)
    try:
        deltas = run(core, [asked(0, capped(2), sampling=Sampling(logprobs=1))])[0]
    finally:
        core.engine.close()
    entries = [entry for delta in deltas for entry in delta.logprobs]
    tokens = tokens_of(deltas)
    assert len(entries) == len(tokens) and tuple(tokens[2:5]) == END
    assert all(-100 < entry.values[0] < 0 for entry in entries)
    assert entries[2].ids[0] == END[0] and entries[2].ranks[0] > 1


@pytest.mark.slow
def test_two_ranks_agree(folder: Path, plain: Core) -> None:
    core = open_runtime(folder, tensor_parallel_size=2)
    try:
        some = [asked(3, capped(9)), asked(4, capped(0))]
        got = _tokens(run(core, some))
    finally:
        core.engine.close()
    assert got == {3: expected(plain, 3, 9), 4: expected(plain, 4, 0)}
