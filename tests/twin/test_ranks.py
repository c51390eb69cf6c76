"""Two tensor-parallel ranks over gloo, each a process: the same loop, the same tokens as one rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import cast

import pytest

from headrace.runtime.ranks import RankFailed, RankGroup
from tests.twin.harness import open_runtime, request, run, tiny_gemma3, tiny_llama, tokens_of
from tests.twin.test_invariants import requests


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3], ids=["llama", "gemma3"])
def test_two_ranks_equal_one(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    folder = make(tmp_path)
    tokens: list[dict[int, list[int]]] = []
    for size in (1, 2):
        core = open_runtime(folder, tensor_parallel_size=size, max_num_tokens=17)
        try:
            tokens.append({key: tokens_of(deltas) for key, deltas in run(core, requests()).items()})
        finally:
            core.engine.close()
    assert tokens[0] == tokens[1]


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    core = open_runtime(tiny_llama(tmp_path), tensor_parallel_size=2)
    group = cast(RankGroup, core.engine)
    try:
        run(core, [request(0, [1, 2, 3])])
        os.kill(group.pids[1], signal.SIGKILL)
        begin_s = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1"):
            run(core, [request(1, [4, 5, 6])])
        assert time.monotonic() - begin_s < 5
    finally:
        core.engine.close()


def test_a_hung_rank_is_named(tmp_path: Path) -> None:
    core = open_runtime(tiny_llama(tmp_path), tensor_parallel_size=2, stall_timeout_s=1.0)
    group = cast(RankGroup, core.engine)
    try:
        run(core, [request(0, [1, 2, 3])])
        os.kill(group.pids[1], signal.SIGSTOP)
        begin_s = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1 has given no sign of life for 1 s"):
            run(core, [request(1, [4, 5, 6])])
        assert time.monotonic() - begin_s < 10
    finally:
        core.engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in group.pids)


def test_a_step_that_never_ends_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks live and none brings a result: nobody has given them a plan."""
    core = open_runtime(tiny_llama(tmp_path), tensor_parallel_size=2, stall_timeout_s=1.0)
    try:
        with pytest.raises(RankFailed, match="ranks 0, 1 made no step in 5 s, though all ranks live"):
            core.engine.collect()
        assert "rank.py" in capfd.readouterr().err, "each tells where it is"
    finally:
        core.engine.close()


def test_a_bad_checkpoint_names_the_rank(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="rank [01]: .*safetensors"):
        open_runtime(folder, tensor_parallel_size=2)


@pytest.mark.slow
def test_real_model_on_two_ranks(smollm2_path: Path) -> None:
    prompts = [[504, 3575, 282, 4649, 314], [1, 2, 3, 4], list(range(100, 160))]
    asked = [request(index, prompt, max_tokens=16) for index, prompt in enumerate(prompts)]
    tokens: list[dict[int, list[int]]] = []
    for size in (1, 2):
        core = open_runtime(str(smollm2_path), tensor_parallel_size=size)
        try:
            tokens.append({key: tokens_of(deltas) for key, deltas in run(core, asked).items()})
        finally:
            core.engine.close()
    assert tokens[0] == tokens[1]
