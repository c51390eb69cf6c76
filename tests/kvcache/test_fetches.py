"""What is brought from disk for one that waits stays on the host until it is admitted, whoever runs meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kvcache.manager import KvCache
from headrace.seam import DISK, HOST, GroupSpec
from tests.kvcache.cases import B, make, prompt
from tests.kvcache.test_saving import rest
from tests.kvcache.test_tiers import Memory

FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=4)
WINDOW = GroupSpec((1,), 1, 8, "float32", window=6, bytes_per_token=4)


def reopened(folder: Path, *, host: int, num_prompts: int = 3, length: int = 4) -> tuple[Memory, list[list[int]]]:
    """A second life that finds prompts of `length` blocks on disk, one token longer than that each."""
    prompts = [prompt(length * B, seed) for seed in range(num_prompts)]
    before = Memory(make(60, host=(20,), disk=(60,), folder=str(folder)))
    for owner, tokens in enumerate(prompts):
        before.serve(owner, tokens)
    rest(before)
    before.kv.close()
    kv = make(7, host=(host + 1,), disk=(60,), folder=str(folder))
    return Memory(kv, before.disk), [[*tokens, 1] for tokens in prompts]


def bring(memory: Memory, owner: int, tokens: list[int]) -> None:
    kv = memory.kv
    assert kv.fetch(owner, tokens, kv.claim())
    while owner not in kv.take_arrived():
        memory.plan()
    kv.check()


def test_running_requests_do_not_drive_it_out(tmp_path: Path) -> None:
    memory, (wanted, *_) = reopened(tmp_path, host=6)
    kv = memory.kv
    bring(memory, 1, wanted)
    for owner in range(2, 12):
        memory.serve(owner, prompt(5 * B, 100 + owner))
        memory.plan()
    assert kv.store.tier(HOST)[0].num_leased == 4
    assert memory.serve(1, wanted) == 4 * B
    assert not kv.extra_leases
    kv.close()


def test_those_who_wait_drive_others_out_of_half_of_the_host_at_most(tmp_path: Path) -> None:
    memory, (one, two, three, other) = reopened(tmp_path, host=17, num_prompts=4)
    kv = memory.kv
    bring(memory, 9, other)  # free blocks
    for owner in range(10, 16):
        memory.serve(owner, prompt(5 * B, 100 + owner))
    kv.abandon(9)
    assert not kv.store.tier(HOST)[0].num_free
    bring(memory, 1, one)
    bring(memory, 2, two)  # 8 of 17 blocks
    assert not kv.fetch(3, three, kv.claim()) and kv.is_fetch_full
    assert kv.store.tier(HOST)[0].num_leased == 8
    assert memory.serve(2, two) == 4 * B and not kv.is_fetch_full
    bring(memory, 3, three)
    kv.abandon(1)
    assert memory.serve(3, three) == 4 * B and not kv.extra_leases
    kv.close()


@pytest.mark.parametrize(("host", "found"), [(4, 4), (3, 3), (2, 2)])
def test_one_alone_may_have_all_of_it_and_takes_what_there_is(tmp_path: Path, host: int, found: int) -> None:
    memory, (wanted, *_) = reopened(tmp_path, host=host)
    bring(memory, 1, wanted)
    assert memory.serve(1, wanted) == found * B
    memory.kv.close()


def test_two_who_want_the_same_share_it(tmp_path: Path) -> None:
    memory, (wanted, other, _) = reopened(tmp_path, host=17)
    kv = memory.kv
    assert kv.fetch(1, wanted, kv.claim()) and kv.fetch(2, wanted, kv.claim())
    while len(kv.take_arrived()) < 2:
        memory.plan()
    bring(memory, 3, other)
    assert kv.store.tier(HOST)[0].num_leased == 8 and kv.stats.prefetched_blocks == 8
    kv.abandon(1)
    kv.check()
    assert kv.store.tier(HOST)[0].num_leased == 8
    assert memory.serve(2, wanted) == 4 * B and memory.serve(3, other) == 4 * B and not kv.extra_leases
    kv.close()


def test_one_that_waits_too_long_holds_nothing(tmp_path: Path) -> None:
    memory, (wanted, *_) = reopened(tmp_path, host=9)
    kv = memory.kv
    assert kv.fetch(1, wanted, kv.claim())
    kv.advance(100.0)
    assert kv.take_arrived() == [1]
    while kv.copies_in_flight:
        memory.plan()
    assert not kv.extra_leases and not kv.is_fetch_full
    kv.close()


def windows(folder: Path, *, device: int, host: int) -> KvCache:
    return make(
        (device, device), specs=(FULL, WINDOW), host=(host + 1, host + 1), disk=(60, 60), folder=str(folder),
        max_tokens_in_flight=40,
    )  # fmt: skip


def serve_windows(kv: KvCache, owner: int, tokens: list[int]) -> int:
    found = kv.admit(owner, tokens, claim=kv.claim(prompt_len=len(tokens)))
    for end in (*range(found + B, len(tokens), B), len(tokens)):
        assert kv.extend(owner, end)
        plan(kv)
        kv.commit(owner, tokens, end)
    kv.release(owner, final=True)
    return found


def plan(kv: KvCache) -> list[list[int]]:
    copies, moves = kv.take_copies().tolist(), kv.take_transfers().tolist()
    kv.check()
    kv.finish_copies([each[0] for each in copies + moves])
    kv.check()
    return copies + moves


def test_windows_are_kept_below_only_where_one_goes_on(tmp_path: Path) -> None:
    """The same prompt again goes on at 28, a longer one at 32. There a window of 6 tokens reaches back to 23 and 27: of
    eight blocks the last three. The others never go down, for want of room, ahead of that, or to be kept."""
    kv = windows(tmp_path, device=20, host=12)
    tokens = [prompt(8 * B, seed) for seed in range(4)]
    for owner, mine in enumerate(tokens):
        serve_windows(kv, owner, mine)
    while kv.copies_in_flight:
        plan(kv)
    claim = kv.claim()
    for mine in tokens:
        path, _ = kv.index.walk(claim.space, mine, 8, ())
        below = [[kv.store.block_of(tier * 2 + 1, node) >= 0 for node in path] for tier in (HOST, DISK)]
        assert below[1] == [False] * 5 + [True] * 3 and not any(below[0][:5]), below
    kv.close()
    again = windows(tmp_path, device=20, host=12)
    # Twelve blocks are no room for twice eight: what can't be resumed without its end isn't brought in part.
    for owner, mine in enumerate(tokens[2:]):
        wanted = [*mine, 1]
        assert again.fetch(owner, wanted, again.claim()) == (owner == 0)
    assert again.is_fetch_full and again.stats.prefetched_blocks == 8 + 2
    while not again.take_arrived():
        plan(again)
    assert serve_windows(again, 0, [*tokens[2], 1]) == 8 * B and not again.is_fetch_full
    assert again.fetch(1, [*tokens[3], 1], again.claim())
    again.abandon(1)
    again.close()
