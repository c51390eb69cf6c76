"""Scales of an FP8 cache: told, missed, and used by whoever attends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.attention.port import AttentionSpec
from headrace.attention.torch import TorchAttention
from headrace.engine.kv_scales import kv_scales_of, spans
from tests.kits.attention import Case, World

FP8 = torch.float8_e4m3fn


def layers(*scales: tuple[float, float] | None) -> list[Any]:
    """None: one that keeps no heads."""
    specs: list[AttentionSpec | None] = [
        None if one is None else AttentionSpec(1, 1, 8, 1.0, k_scale=one[0], v_scale=one[1]) for one in scales
    ]
    return [SimpleNamespace(spec=spec) for spec in specs]


def test_layers_without_scales_are_named(caplog: pytest.LogCaptureFixture) -> None:
    plain = (1.0, 1.0)
    given = layers(plain, plain, (0.5, 0.25), None, plain)
    assert kv_scales_of(given, FP8) == ((0, *plain), (1, *plain), (2, 0.5, 0.25), (4, *plain))
    assert "layers 0-1, 4 has the scale 1.0" in caplog.text
    caplog.clear()
    assert kv_scales_of(given, torch.bfloat16) == () and not caplog.records
    assert kv_scales_of(layers((0.5, 0.25)), FP8) == ((0, 0.5, 0.25),) and not caplog.records


def test_layers_that_keep_no_heads_of_their_own_are_left_out() -> None:
    """They attend to another's keys, or are recurrent."""
    (layer,) = layers((1.0, 1.0))
    shared = SimpleNamespace(spec=replace(layer.spec, source=0))
    recurrent = SimpleNamespace(state=object(), before=print, mix=print, after=print)
    given: list[Any] = [layer, shared, recurrent]
    assert [index for index, *_ in kv_scales_of(given, FP8)] == [0]


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and spans([3]) == "3"


def test_what_is_attended_has_the_scales_back() -> None:
    """Near an unquantised cache; a scale that is forgotten on one of the two ways would be 30 times off."""
    wanted = World(Case(lengths=(19, 7))).attend(TorchAttention(), [[(0, 12), (1, 6)], [(0, 7), (1, 1)]])
    world = World(Case(lengths=(19, 7), kv_dtype=FP8))
    cache, done, spec = world.new_cache(TorchAttention()), [0, 0], replace(world.spec, k_scale=0.03, v_scale=0.02)
    found: list[list[torch.Tensor]] = [[], []]
    for rows in ([(0, 12), (1, 6)], [(0, 7), (1, 1)]):
        step = world.step(rows, done)
        out = TorchAttention().run(world.projected(rows, done), cache=cache, step=step, spec=spec).data
        for (row, count), part in zip(rows, out.split([count for _, count in rows]), strict=True):
            found[row].append(part.unflatten(-1, (world.case.num_heads, world.case.head_dim)))
            done[row] += count
    for ours, theirs in zip(map(torch.cat, found), wanted):
        assert (ours - theirs).norm() / theirs.norm() < 0.1
