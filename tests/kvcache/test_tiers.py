"""Blocks that go down and come back: copies in order, transfers beside, failures, the disk across lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kvcache.fetches import FETCH_TIMEOUT_S
from headrace.kvcache.manager import KvCache
from headrace.seam import DEVICE, DISK, HOST
from headrace.types import Retention, RetentionRange
from tests.kvcache.cases import B, make, prompt, serve


class Memory:
    """What every block holds, moved as the plans say: the whole prefix its tokens were computed after."""

    def __init__(self, kv: KvCache, disk: dict[int, tuple[int, tuple[int, ...]]] | None = None) -> None:
        self.kv = kv
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}
        self.disk = {} if disk is None else disk
        """By block: (stamp, what it holds)."""

    def plan(self, *, transfers: bool = True, fail: bool = False) -> dict[str, int]:
        """One plan and its report -> moves by way."""
        seen: dict[str, int] = {}
        copies, moves = self.kv.take_copies().tolist(), self.kv.take_transfers().tolist()
        self.kv.check()
        for _, _, tier, source, to_tier, target in copies:
            self.held[to_tier, target] = self.held[tier, source]
            seen[f"{tier}{to_tier}"] = seen.get(f"{tier}{to_tier}", 0) + 1
        if not transfers:
            assert not moves
        done = [copy[0] for copy in copies] + [move[0] for move in moves]
        for _, _, tier, source, to_tier, target, stamp in moves if not fail else []:
            if to_tier == DISK:
                self.disk[target] = stamp, self.held[tier, source]
            elif tier == DISK:
                assert self.disk[source][0] == stamp
                self.held[to_tier, target] = self.disk[source][1]
            else:
                self.held[to_tier, target] = self.held[tier, source]
            seen[f"{tier}{to_tier}"] = seen.get(f"{tier}{to_tier}", 0) + 1
        if fail:
            self.kv.fail_copies([move[0] for move in moves])
        self.kv.finish_copies(done)
        self.kv.check()
        return seen

    def begin(self, owner: int, tokens: list[int], retention: Retention | None = None) -> int:
        """Admission and prefill, every reused block read."""
        kv = self.kv
        found = kv.admit(owner, tokens, claim=kv.claim(retention=retention, prompt_len=len(tokens)))
        assert kv.extend(owner, len(tokens))
        self.plan()
        table = kv.table(owner)
        for at in range(found // B):
            assert self.held[DEVICE, table[at]] == tuple(tokens[: (at + 1) * B])
        for at in range(found // B, len(tokens) // B):
            self.held[DEVICE, table[at]] = tuple(tokens[: (at + 1) * B])
        kv.commit(owner, tokens, len(tokens))
        return found

    def serve(self, owner: int, tokens: list[int], retention: Retention | None = None) -> int:
        found = self.begin(owner, tokens, retention)
        self.kv.release(owner)
        self.kv.check()
        return found


def test_a_victim_is_copied_down_and_comes_back() -> None:
    kv = make(5, host=(20,))
    memory = Memory(kv)
    one, two = prompt(4 * B), prompt(4 * B, 1)
    memory.serve(1, one)
    memory.serve(2, two)
    assert kv.match([*one, 1]) == 4 * B, "what left the device is still found"
    assert memory.serve(3, one) == 3 * B and memory.serve(4, two) == 3 * B
    stats = kv.stats
    assert stats.evictions >= 8 and stats.num_cached == (4,) and stats.host_total == (19,)
    size = kv.store.block_bytes[0]
    assert stats.onboard_bytes == 6 * size and stats.offload_bytes == 8 * size
    assert not kv.copies_in_flight and not kv.extra_leases


def test_copies_hold_both_ends_until_they_are_reported() -> None:
    kv = make(5, host=(20,))
    memory = Memory(kv)
    one = prompt(4 * B)
    memory.serve(1, one)
    memory.serve(2, prompt(4 * B, 1))
    assert kv.admit(3, one) == 3 * B
    ids = kv.take_copies()[:, 0].tolist()
    kv.release(3)
    kv.check()
    assert kv.copies_in_flight and kv.stats.num_leased == (3,), "the blocks that are being filled"
    assert kv.tiers.is_busy
    kv.finish_copies(ids)
    kv.check()
    assert kv.stats.num_leased == (0,) and not kv.extra_leases and kv.match(one) == 3 * B


def test_low_priorities_are_dropped() -> None:
    kv = make(5, host=(20,), offload_min_priority=35)
    memory = Memory(kv)
    one, two = prompt(4 * B), prompt(4 * B, 1)
    memory.serve(1, one, Retention(ranges=(RetentionRange(0, 2 * B, 36), RetentionRange(2 * B, None, 34))))
    memory.serve(2, two)
    assert kv.match([*one, 1]) == 2 * B
    assert kv.store.tier(HOST)[0].num_cached >= 2


def test_the_host_forgets_the_least_worthy() -> None:
    kv = make(5, host=(5,))
    memory = Memory(kv)
    prompts = [prompt(4 * B, seed) for seed in range(3)]
    memory.serve(0, prompts[0], Retention(ranges=(RetentionRange(0, None, 90),)))
    for owner in (1, 2):
        memory.serve(owner, prompts[owner])
    assert kv.match([*prompts[0], 1]) == 4 * B, "a victim of less priority doesn't drive it out"
    assert kv.match([*prompts[1], 1]) == 0


def test_victims_are_copied_ahead_of_need() -> None:
    kv = make(9, host=(40,))
    memory = Memory(kv)
    for owner in range(2):
        memory.serve(owner, prompt(4 * B, owner))
    order = list(kv.pools[0].eviction_order())
    while memory.plan():
        pass
    assert list(kv.pools[0].eviction_order()) == order, "being copied is no use"
    assert kv.store.tier(HOST)[0].num_cached == 8
    memory.kv.admit(9, [5000])
    assert kv.extend(9, 8 * B) and memory.plan() == {}, "nothing is left to copy in a hurry"


def test_looking_ahead_keeps_promises() -> None:
    kv = make(9, host=(40,))
    memory = Memory(kv)
    memory.serve(1, prompt(8 * B))
    kv.admit(2, [5000], limit=7 * B)
    kv.check()
    kv.take_copies()
    assert len(kv.take_transfers()) == 1
    assert kv.extend(2, 7 * B)


@pytest.mark.parametrize("fail", [False, True])
def test_a_failed_transfer_is_a_miss(fail: bool, tmp_path: Path) -> None:
    kv = make(5, host=(40,))
    memory = Memory(kv)
    memory.serve(1, prompt(4 * B))
    memory.plan(fail=fail)
    host = kv.store.tier(HOST)[0]
    assert (host.num_cached, kv.stats.failed_transfers) == ((0, 4) if fail else (4, 0))


def three_tiers(folder: Path) -> KvCache:
    return make(6, host=(9,), disk=(60,), folder=str(folder), fingerprint="model")


def fill_disk(memory: Memory) -> list[list[int]]:
    prompts = [prompt(4 * B, seed) for seed in range(5)]
    for owner, tokens in enumerate(prompts):
        memory.serve(owner, tokens)
        for _ in range(4):
            memory.plan()
    return prompts


def test_disk_blocks_are_fetched_for_one_that_waits(tmp_path: Path) -> None:
    kv = three_tiers(tmp_path)
    memory = Memory(kv)
    prompts = fill_disk(memory)
    lost = next(tokens for tokens in prompts if not kv.match([*tokens, 1]))
    tokens = [*lost, 1]
    assert kv.fetch(77, tokens, kv.claim()) and not kv.take_arrived()
    kv.check()
    while not (arrived := kv.take_arrived()):
        memory.plan()
    assert arrived == [77] and kv.match(tokens) == 4 * B
    assert memory.serve(77, tokens) == 4 * B
    assert kv.stats.disk_read_bytes == kv.stats.prefetched_blocks * kv.store.block_bytes[0] > 0
    assert not kv.fetch(78, tokens, kv.claim()), "nothing to wait for"
    kv.close()


def test_a_fetch_that_fails_or_takes_too_long_ends_the_wait(tmp_path: Path) -> None:
    kv = three_tiers(tmp_path)
    memory = Memory(kv)
    prompts = fill_disk(memory)
    first, second = [[*tokens, 1] for tokens in prompts if not kv.match([*tokens, 1])][:2]
    assert kv.fetch(1, first, kv.claim())
    kv.take_copies()
    moves = kv.take_transfers()
    reads = [move[0] for move in moves.tolist() if move[2] == DISK]
    assert len(reads) == 4
    kv.fail_copies(reads)
    kv.finish_copies(moves[:, 0].tolist())
    kv.check()
    assert kv.take_arrived() == [1] and kv.match(first) == 0
    assert not kv.fetch(2, first, kv.claim()), "what could not be read is gone from the disk as well"
    kv.advance(10.0)
    assert kv.fetch(3, second, kv.claim())
    kv.advance(10.0 + FETCH_TIMEOUT_S)
    assert kv.take_arrived() == [3]
    kv.check()
    kv.close()


def test_an_owner_that_goes_is_not_told(tmp_path: Path) -> None:
    kv = three_tiers(tmp_path)
    memory = Memory(kv)
    prompts = fill_disk(memory)
    tokens = next([*tokens, 1] for tokens in prompts if not kv.match([*tokens, 1]))
    assert kv.fetch(1, tokens, kv.claim())
    kv.abandon(1)
    while kv.copies_in_flight:
        memory.plan()
    assert not kv.take_arrived()
    kv.close()


def test_the_disk_is_found_again_after_a_restart(tmp_path: Path) -> None:
    kv = three_tiers(tmp_path)
    memory = Memory(kv)
    prompts = fill_disk(memory)
    kept = [tokens for tokens in prompts if kv.lookup.to_fetch([*tokens, 1], kv.claim())]
    assert len(kept) >= 2
    kv.close()
    again = three_tiers(tmp_path)
    again.check()
    memory = Memory(again, memory.disk)
    for owner, tokens in enumerate(kept):
        wanted = [*tokens, 1]
        assert again.match(wanted) == 0 and again.fetch(owner, wanted, again.claim())
        while not again.take_arrived():
            memory.plan()
        assert memory.serve(owner, wanted) == 4 * B
    again.close()
    other = make(5, host=(9,), disk=(60,), folder=str(tmp_path), fingerprint="another model")
    assert not any(other.fetch(owner, [*tokens, 1], other.claim()) for owner, tokens in enumerate(kept))
    other.close()


def test_blocks_are_computed_again_when_that_is_faster() -> None:
    kv = make(5, host=(20,), copy_bytes_per_s=1.0)
    memory = Memory(kv)
    one = prompt(4 * B)
    memory.serve(1, one)
    memory.serve(2, prompt(4 * B, 1))
    assert kv.match([*one, 1]) == 4 * B
    kv.set_prefill_speed(1e9)
    assert kv.match([*one, 2]) == 0
    kv.set_prefill_speed(1e-9)
    assert kv.match([*one, 3]) == 4 * B


def test_a_partial_hit_comes_from_the_host() -> None:
    kv = make(6, host=(20,), partial_reuse=True)
    memory = Memory(kv)
    one = prompt(4 * B)
    memory.serve(1, one)
    memory.serve(2, prompt(4 * B, 1))
    other = [*one[: B + 2], 5000]
    assert kv.admit(3, other) == B + 2
    copies = kv.take_copies().tolist()
    assert [target for _, _, tier, _, _, target in copies if tier == HOST] == kv.table(3)[1:]
    kv.check()
    kv.finish_copies([copy[0] for copy in copies])
    kv.release(3)
    kv.check()
    assert serve(kv, 4, [*one, 1]) == 4 * B
