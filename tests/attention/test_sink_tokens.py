"""Layers with a window that also see the first tokens: the twin and the compiled kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.attention.cpu import CpuAttention
from headrace.attention.port import AttentionBackend
from headrace.attention.torch import TorchAttention
from headrace.kernels._native import library
from tests.kits import attention as kit
from tests.kits.attention import INVALID_BLOCK, Case, World

CASES = {
    "inside a block": Case(window=9, sink_tokens=3, lengths=(50, 31, 2)),
    "over blocks": Case(window=9, sink_tokens=13, lengths=(50, 31, 8, 13, 14)),
    "a whole tile": Case(window=20, sink_tokens=32, block_size=16, lengths=(90, 33)),
    "wider than the window": Case(window=2, sink_tokens=40, lengths=(75, 41, 39)),
    "touches the window": Case(window=16, sink_tokens=16, block_size=32, head_dim=64, lengths=(70, 33)),
    "with logits and a cap": Case(window=7, sink_tokens=5, has_sinks=True, soft_cap=3.0),
    "half": Case(window=9, sink_tokens=4, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=72),
    "no window": Case(sink_tokens=5),
}


@pytest.mark.parametrize("backend", [TorchAttention(), CpuAttention()], ids=["torch", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(backend: AttentionBackend, name: str) -> None:
    for seed in range(3):
        kit.check_reference(backend, replace(CASES[name], seed=seed))


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("name", CASES)
def test_same_bits_however_the_work_is_cut(name: str) -> None:
    kit.check_same_bits(CpuAttention(), CASES[name])


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("sink_tokens", [4, 520])
def test_same_bits_over_several_parts(sink_tokens: int) -> None:
    case = Case(
        lengths=(1700, 40), block_size=32, num_kv_heads=1, group=2, head_dim=16, window=100, sink_tokens=sink_tokens
    )
    world, backend = World(case), CpuAttention()
    expected = world.attend(backend, kit.whole(case))
    kit.assert_close(world, expected)
    decode = [[(0, 1622), (1, 39)], *[[(0, 1)]] * 4, [(0, 1), (1, 1)], [(0, 73)]]
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for schedule in (kit.chunked(case, 97), decode):
                kit.assert_same(world.attend(backend, schedule), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("backend", [TorchAttention(), CpuAttention()], ids=["torch", "cpu"])
def test_only_blocks_between_sinks_and_window_are_given_back(backend: AttentionBackend) -> None:
    """Their table entries are never used, nor is what the dummy block holds."""
    case = Case(lengths=(70,), block_size=4, window=9, sink_tokens=6)
    world = World(case)
    cache = world.new_cache(backend)
    (out,) = world.attend(backend, [[(0, 50)]], cache=cache)
    tables = world.tables.clone()
    for token in range(50, 70):
        world.tables[0, 2 : max(2, (token - 8) // 4)] = INVALID_BLOCK
        step = world.step([(0, 1)], [token])
        backend.plan(step)
        act = backend.run(world.projected([(0, 1)], [token]), cache=cache, step=step, spec=world.spec)
        out = torch.cat([out, act.data.view(1, case.num_heads, case.head_dim)])
    world.tables = tables
    kit.assert_close(world, [out])
