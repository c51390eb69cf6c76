"""Recurrent groups: where states are saved, what names them, and reuse at snapshots only."""

from __future__ import annotations

import pytest

from headrace.kvcache.manager import KvCache
from headrace.kvcache.settings import CacheSettings
from headrace.kvcache.snapshots import positions
from headrace.kvcache.table import NEVER
from headrace.seam import DEVICE, HOST, GroupSpec
from tests.kvcache.cases import B, make, prompt

FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=4)
STATE = GroupSpec((1,), 0, 0, "float32", state_bytes=64)
SLOT = 3


def states(num_states: int = 9, **settings: object) -> KvCache:
    return make(
        (40, num_states), specs=(FULL, STATE), **{"snapshot_interval": 2 * B, "partial_reuse": True, **settings}
    )


def live(kv: KvCache, owner: int, tokens: list[int], *, end: bool = True) -> tuple[int, list[int], list[int]]:
    """A prompt in chunks that end where they have to -> (reused, positions saved, blocks saved)."""
    found = kv.admit(owner, tokens, claim=kv.claim(prompt_len=len(tokens)))
    kv.begin(owner, SLOT)
    kv.check()
    assert [block for _, block, _ in kv.take_restores().tolist()] == ([snapshot_of(kv, tokens, found)] if found else [])
    planned, saved, blocks = found, list[int](), list[int]()
    while planned < len(tokens):
        planned = min(len(tokens), kv.next_stop(owner, planned))
        assert kv.extend(owner, planned)
        kv.save(owner, planned, SLOT)
        for group, slot, block in kv.take_saves().tolist():
            assert (group, slot) == (1, SLOT)
            saved.append(planned)
            blocks.append(block)
        kv.check()
        kv.commit(owner, tokens, planned)
        kv.check()
    if end:
        kv.release(owner)
        kv.check()
    return found, saved, blocks


def snapshot_of(kv: KvCache, tokens: list[int], position: int) -> int:
    node = kv.index.walk(kv.claim().space, tokens, position // B)[0][position // B - 1]
    return kv.index.blocks[1][node]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"snapshot_interval": 8}, (8, 16, 24, 32)),
        ({"snapshot_interval": 11}, (8, 16, 24, 32)),
        ({"snapshot_interval": 1}, (4, 8, 12, 16, 20, 24, 28, 32)),
        ({"snapshots_from_start": (3, 13, 99)}, (12,)),
        ({"snapshots_from_end": (0, 5, 99)}, (24, 28)),
        ({"branch_snapshots": True}, (20,)),
        ({"snapshot_interval": 16, "snapshots_from_end": (0,), "branch_snapshots": True}, (16, 20, 28, 32)),
    ],
)
def test_positions(changes: dict[str, object], expected: tuple[int, ...]) -> None:
    settings = CacheSettings(tokens_per_block=4, **changes)  # type: ignore[arg-type]
    assert positions(settings, prompt_len=30, num_tokens=34, start=0, branch=20) == expected
    later = positions(settings, prompt_len=30, num_tokens=34, start=16, branch=20)
    assert later == tuple(position for position in expected if position > 16)


def test_chunks_end_where_states_are_saved() -> None:
    kv = states()
    kv.admit(1, prompt(5 * B))
    assert [kv.next_stop(1, planned) for planned in (0, 1, 2 * B, 4 * B)] == [2 * B, 2 * B, 4 * B, NEVER]
    kv.release(1)
    plain = make()
    plain.admit(1, prompt(5 * B))
    assert plain.next_stop(1, 0) == NEVER


def test_a_prefix_is_reused_at_snapshots_only() -> None:
    kv = states()
    tokens = prompt(7 * B)
    assert live(kv, 1, tokens)[:2] == (0, [2 * B, 4 * B, 6 * B])
    for length, found in ((2 * B, 0), (2 * B + 1, 2 * B), (4 * B, 2 * B), (6 * B, 4 * B), (7 * B, 6 * B)):
        assert kv.match(tokens[:length]) == found, length
    assert kv.match([*tokens[: 3 * B], 9000, 9001]) == 2 * B, "no part of a block behind it"
    assert live(kv, 2, tokens)[:2] == (6 * B, [])
    assert kv.stats.num_leased == (0, 0)


def test_without_snapshots_nothing_is_reused() -> None:
    kv = states(snapshot_interval=0)
    tokens = prompt(7 * B)
    live(kv, 1, tokens)
    before = kv.stats
    assert live(kv, 2, tokens)[:2] == (0, [])
    assert kv.stats.miss_tokens_granularity - before.miss_tokens_granularity == 7 * B


def test_a_snapshot_goes_without_its_node_and_a_node_without_its_snapshot() -> None:
    kv = states()
    tokens = prompt(6 * B + 1)
    live(kv, 1, tokens)
    nodes = kv.index.walk(kv.claim().space, tokens, 6)[0]
    kv.store.unname(1, nodes[5])
    kv.check()
    assert kv.match(tokens) == 4 * B
    kv.store.unname(0, nodes[2])
    kv.check()
    assert kv.match(tokens) == 2 * B
    kv.store.unname(1, nodes[1])
    assert kv.match(tokens) == 0
    assert live(kv, 2, tokens)[:2] == (0, [2 * B, 4 * B, 6 * B])
    assert kv.match(tokens) == 6 * B
    kv.check()


def test_few_snapshot_blocks_are_recycled() -> None:
    kv = states(3)
    tokens = prompt(9 * B)
    assert live(kv, 1, tokens)[1] == [2 * B, 4 * B, 6 * B, 8 * B]
    assert kv.match(tokens) == 8 * B and kv.stats.num_cached[1] == 2
    live(kv, 2, prompt(9 * B, 1))
    assert kv.match(tokens) == 0


def test_with_all_snapshots_held_a_request_goes_on_without() -> None:
    kv = states(3)
    tokens = prompt(5 * B)
    live(kv, 1, tokens)
    for block in list(kv.pools[1].eviction_order()):
        kv.store.lease(1, block)
    assert live(kv, 2, prompt(5 * B, 1))[:2] == (0, [])


def test_what_is_not_committed_is_not_found() -> None:
    kv = states()
    tokens = prompt(2 * B + 1)
    kv.admit(1, tokens)
    assert kv.extend(1, 2 * B)
    kv.save(1, 2 * B, SLOT)
    assert len(kv.take_saves()) == 1 and kv.stats.num_leased[1] == 1
    kv.release(1)
    kv.check()
    assert kv.match(tokens) == 0 and kv.stats.num_leased[1] == 0


def test_a_restored_snapshot_is_held_until_the_plan_is_made() -> None:
    kv = states(2)
    tokens = prompt(2 * B + 1)
    live(kv, 1, tokens)
    assert kv.admit(2, tokens) == 2 * B
    kv.begin(2, SLOT)
    kv.check()
    assert kv.stats.num_leased[1] == 1
    ((group, block, slot),) = kv.take_restores().tolist()
    assert (group, slot) == (1, SLOT) and block == snapshot_of(kv, tokens, 2 * B)
    kv.check()
    assert kv.stats.num_leased[1] == 0


def test_a_branch_is_saved_where_it_leaves() -> None:
    kv = states(snapshot_interval=0, branch_snapshots=True)
    stem = prompt(4 * B)
    assert live(kv, 1, [*stem, *prompt(3 * B, 1)])[1] == []
    assert live(kv, 2, [*stem, *prompt(3 * B, 2)])[:2] == (0, [4 * B])
    assert live(kv, 3, [*stem, *prompt(3 * B, 3)])[0] == 4 * B


def test_a_snapshot_comes_back_from_the_host() -> None:
    kv = states(2, host=(40, 9))
    tokens = prompt(2 * B + 1)
    live(kv, 1, tokens)
    live(kv, 2, prompt(2 * B + 1, 1))
    assert (kv.take_copies()[:, [1, 2, 4]] == [1, DEVICE, HOST]).all()
    kv.finish_copies(range(50))
    assert kv.admit(3, tokens) == 2 * B
    kv.check()
    assert [tuple(copy[1:5:1]) for copy in kv.take_copies().tolist() if copy[2] == HOST]
    kv.begin(3, SLOT)
    assert len(kv.take_restores()) == 1
    kv.check()


def test_only_recurrent_layers() -> None:
    kv = make((9,), specs=(STATE,), snapshot_interval=2 * B)
    tokens = prompt(5 * B)
    assert kv.max_tokens() > 10**9 and kv.can_admit(tokens, num_tokens=10**6)
    found = kv.admit(1, tokens)
    for position in (2 * B, 4 * B, 5 * B):
        assert kv.extend(1, position)
        kv.save(1, position, SLOT)
        kv.commit(1, tokens, position)
        kv.check()
    kv.release(1)
    kv.check()
    assert found == 0 and kv.match(tokens) == 4 * B
    assert kv.index.num_nodes == 5, "what leads to no snapshot is gone"
