"""Batches of copies against copies one after another, and how a CPU does them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.copies import CopyBatch, CpuMover, batch_copies, copy_bytes_per_s, make_mover, runs
from headrace.engine.host_tier import HostTier
from headrace.seam import DEVICE, HOST, Ints, int_rows

NUM_GROUPS, NUM_BLOCKS = 2, 5


@st.composite
def plans(draw: st.DrawFn) -> Ints:
    """Copies among few blocks, so that they depend on one another."""
    block = st.integers(1, NUM_BLOCKS - 1)
    ways = st.sampled_from([(DEVICE, DEVICE), (DEVICE, HOST), (HOST, DEVICE)])
    copies: list[tuple[int, ...]] = []
    for copy_id in range(draw(st.integers(0, 12))):
        (source_tier, tier), source, destination = draw(ways), draw(block), draw(block)
        if (source_tier, source) != (tier, destination):
            copies.append((copy_id, draw(st.integers(0, NUM_GROUPS - 1)), source_tier, source, tier, destination))
    return int_rows(copies, 6)


def tiers() -> dict[tuple[int, int], list[str]]:
    """By (tier, group), what each block holds."""
    return {
        (tier, group): [f"{tier}.{group}.{block}" for block in range(NUM_BLOCKS)]
        for tier in (DEVICE, HOST)
        for group in range(NUM_GROUPS)
    }


def one_by_one(copies: Ints) -> dict[tuple[int, int], list[str]]:
    found = tiers()
    for _, group, source_tier, source, tier, destination in copies.tolist():
        found[tier, group][destination] = found[source_tier, group][source]
    return found


@given(plans())
def test_batches_do_what_copies_in_order_do(copies: Ints) -> None:
    """Whether a batch gathers first (kernels) or goes one by one (copy engines)."""
    batches = batch_copies(copies)
    assert sum(len(batch.sources) for batch in batches) == len(copies)
    for gathers in (True, False):
        found = tiers()
        for batch in batches:
            source, to = found[batch.source_tier, batch.group], found[batch.destination_tier, batch.group]
            gathered = [source[block] for block in batch.sources]
            for at, block in enumerate(batch.destinations):
                to[block] = gathered[at] if gathers else source[batch.sources[at]]
        assert found == one_by_one(copies)


def test_independent_copies_are_one_batch_a_kind() -> None:
    copies = [(i, 0, *((DEVICE, i + 1, HOST, i + 1) if i % 2 else (HOST, i + 10, DEVICE, i + 10))) for i in range(8)]
    assert batch_copies(int_rows(copies, 6)) == [
        CopyBatch(0, HOST, DEVICE, [10, 12, 14, 16], [10, 12, 14, 16]),
        CopyBatch(0, DEVICE, HOST, [2, 4, 6, 8], [2, 4, 6, 8]),
    ]


def test_eviction_and_onboarding_into_the_same_blocks_stay_in_order() -> None:
    down = [(i, 0, DEVICE, i + 1, HOST, i + 1) for i in range(3)]
    up = [(i + 3, 0, HOST, i + 7, DEVICE, i + 1) for i in range(3)]
    batches = batch_copies(int_rows([*down, *up], 6))
    assert [(batch.source_tier, batch.destination_tier) for batch in batches] == [(DEVICE, HOST), (HOST, DEVICE)]


def test_runs_of_neighbours_end_at_chunks() -> None:
    sources, destinations = [3, 4, 5, 6, 9, 10, 2], [7, 8, 9, 10, 11, 13, 14]
    assert list(runs(sources, destinations, chunk=100)) == [(3, 7, 4), (9, 11, 1), (10, 13, 1), (2, 14, 1)]
    assert list(runs([3, 4, 5, 6], [7, 8, 9, 10], chunk=5)) == [(3, 7, 2), (5, 9, 1), (6, 10, 1)]
    assert list(runs([], [], chunk=5)) == []


@given(plans())
def test_a_cpu_copies_in_order(copies: Ints) -> None:
    sizes = [16] * NUM_GROUPS
    host = HostTier(sizes, [NUM_BLOCKS] * NUM_GROUPS, torch.device("cpu"))
    arenas = [torch.zeros(NUM_BLOCKS, 16, dtype=torch.uint8) for _ in sizes]
    names = sorted({name for blocks in tiers().values() for name in blocks})
    for (tier, group), blocks in tiers().items():
        for block, name in enumerate(blocks):
            (arenas[group].numpy() if tier == DEVICE else host.arrays[group])[block] = names.index(name)
    mover = CpuMover(arenas, host)
    mover.copy(copies)
    for (tier, group), blocks in one_by_one(copies).items():
        rows = arenas[group].numpy() if tier == DEVICE else host.arrays[group]
        assert [names[row[0]] for row in rows] == blocks and (rows == rows[:, :1]).all()
    assert sorted(mover.take_done()) == [(copy_id, True) for copy_id in sorted(copies[:, 0].tolist())]
    assert mover.take_done() == []


def test_a_mover_without_a_host_tier() -> None:
    arena = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 8)
    mover = make_mover([arena], HostTier([8], (), torch.device("cpu")), torch.device("cpu"))
    mover.copy(int_rows([(7, 0, DEVICE, 3, DEVICE, 1)], 6))
    assert arena[:, 0].tolist() == [0, 3, 2, 3] and mover.take_done() == [(7, True)]
    mover.close()


def test_the_rate_is_measured() -> None:
    assert 1e6 < copy_bytes_per_s(torch.device("cpu")) < 1e13


def test_arrays_share_memory_with_rows() -> None:
    host = HostTier([24], [3], torch.device("cpu"))
    host.arrays[0][2] = 5
    assert host.rows[0][2].tolist() == [5] * 24 and not np.any(host.arrays[0][:2])
