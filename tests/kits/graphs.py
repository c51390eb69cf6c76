"""CUDA graphs without CUDA: what is captured is computed again, so that padding can be tested anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.engine import step
from headrace.engine.batch import Batch
from headrace.sampling.rows import Upload


class Again:
    """A replay: what the step computes anew goes where it was left."""

    def __init__(self, compute: Callable[[], Any], left: Any) -> None:
        self.compute = compute
        self.left = left
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        _overwrite(self.left, self.compute())


def _overwrite(left: Any, new: Any) -> None:
    if isinstance(left, torch.Tensor):
        left.copy_(new)
    elif isinstance(left, Batch):
        _overwrite((left.slots, left.kv_lens, left.was_done), (new.slots, new.kv_lens, new.was_done))
    elif left is not None:
        for one, other in zip(left, new, strict=True):
            _overwrite(one, other)


class Pool:
    num_bytes = 0

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.graphs: list[Again] = []

    def capture(self, compute: Callable[[], Any]) -> tuple[Again, Any]:
        left = compute()
        self.graphs.append(Again(compute, left))
        return self.graphs[-1], left


def use_pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """-> those of the steppers that are made from now on"""
    opened: list[Pool] = []

    def pool(device: torch.device) -> Pool:
        opened.append(Pool(device))
        return opened[-1]

    monkeypatch.setattr(step, "GraphPool", pool)
    # Outputs are overwritten in place by the next step; only a GPU's way to the host copies them.
    monkeypatch.setattr(step, "Upload", lambda values: Upload(values.clone()))
    return opened
