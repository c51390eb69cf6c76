from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headrace.engine.profiling import Profiling
from headrace.seam import Command

CPU = torch.device("cpu")


def start(**args: Any) -> Command:
    return Command(1, "start_profile", {"label": "x", "num_steps": 0, "start_step": 0, "activities": [], **args})


STOP = Command(2, "stop_profile")


def step(profiling: Profiling) -> None:
    profiling.step()
    torch.ones(4) @ torch.ones(4)


def test_from_start_to_stop(tmp_path: Path) -> None:
    profiling = Profiling(str(tmp_path), rank=1, device=CPU)
    assert "no trace" in profiling.run(STOP)["error"]
    assert profiling.run(start())["files"] == ["headrace-trace-x-rank-1.json"]
    assert "already" in profiling.run(start())["error"]
    step(profiling)
    assert profiling.run(STOP)["files"] == ["headrace-trace-x-rank-1.json"]
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "headrace-trace-x-rank-1.json").read_text())["traceEvents"]
    }
    assert "aten::dot" in names
    assert "no trace" in profiling.run(STOP)["error"]


def test_so_many_steps(tmp_path: Path) -> None:
    profiling = Profiling(str(tmp_path), rank=0, device=CPU)
    profiling.run(start(start_step=1, num_steps=2))
    for _ in range(3):
        step(profiling)
        assert not list(tmp_path.iterdir())
    step(profiling)
    trace = json.loads((tmp_path / "headrace-trace-x-rank-0.json").read_text())
    assert sum(event.get("name") == "aten::dot" for event in trace["traceEvents"]) == 2


def test_without_a_step_or_a_folder(tmp_path: Path) -> None:
    profiling = Profiling(str(tmp_path), rank=0, device=CPU)
    profiling.run(start())
    assert profiling.run(STOP)["files"] == [] and not list(tmp_path.iterdir())
    assert "profile_dir" in Profiling(None, rank=0, device=CPU).run(start())["error"]


def test_a_folder_that_has_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    profiling = Profiling(str(folder), rank=0, device=CPU)
    profiling.run(start())
    step(profiling)
    assert "could not be written" in profiling.run(STOP)["error"]
