"""What goes to disk while nobody runs."""

from __future__ import annotations

from pathlib import Path

from headrace.seam import DISK, HOST
from tests.kvcache.cases import B, make, prompt
from tests.kvcache.test_tiers import Memory


def rest(memory: Memory) -> int:
    """Plans until nothing moves any more -> how many."""
    count = 0
    while memory.kv.copies_in_flight:
        memory.plan()
        count += 1
        assert count < 100, "never comes to rest"
    return count


def test_what_never_left_the_device_is_found_in_the_next_life(tmp_path: Path) -> None:
    folder = str(tmp_path)
    kv = make(40, host=(4,), disk=(40,), folder=folder)
    memory = Memory(kv)
    prompts = [prompt(4 * B, seed) for seed in range(3)]
    for owner, tokens in enumerate(prompts):
        memory.serve(owner, tokens)
    assert kv.copies_in_flight, "nobody runs: it is time to write"
    assert rest(memory) > 0
    assert kv.store.tier(DISK)[0].num_cached == 12
    assert kv.match([*prompts[0], 1]) == 4 * B and kv.stats.evictions == 0
    kv.close()
    after = make(40, host=(8,), disk=(40,), folder=folder)
    assert after.store.tier(DISK)[0].num_cached == 12
    assert rest(Memory(after, memory.disk)) <= 1, "all of it is there already"
    after.close()


def test_a_small_disk_gets_whole_prefixes(tmp_path: Path) -> None:
    kv = make(40, host=(4,), disk=(7,), folder=str(tmp_path))
    memory = Memory(kv)
    prompts = [prompt(4 * B, seed) for seed in range(3)]
    for owner, tokens in enumerate(prompts):
        memory.serve(owner, tokens)
    rest(memory)
    index, disk = kv.index, kv.store.tier(DISK)[0]
    assert disk.num_cached == 6
    for node in disk.node:
        if node >= 0 and index.parent[index.parent[node]] >= 0:
            assert kv.store.block_of(2, index.parent[node]) >= 0, "a block that can't be reached without its parent"
    kv.close()


def test_writing_gives_way_to_requests(tmp_path: Path) -> None:
    kv = make(40, host=(4,), disk=(40,), folder=str(tmp_path))
    memory = Memory(kv)
    memory.serve(0, prompt(4 * B))
    memory.plan()
    memory.begin(1, prompt(4 * B, 1))
    memory.plan()
    memory.plan()
    assert memory.plan() == {}, "with somebody running nothing is begun for its own sake"
    kv.release(1)
    rest(memory)
    assert kv.store.tier(DISK)[0].num_cached == 8
    kv.close()


def test_failures_end(tmp_path: Path) -> None:
    kv = make(40, host=(4,), disk=(40,), folder=str(tmp_path))
    memory = Memory(kv)
    memory.serve(0, prompt(6 * B))
    count = 0
    while kv.copies_in_flight:
        memory.plan(fail=True)
        count += 1
        assert count < 100, "a full disk is tried for ever"
    assert kv.store.tier(DISK)[0].num_cached == 0
    kv.close()


def test_what_a_copy_still_fills_is_not_written(tmp_path: Path) -> None:
    kv = make((5, 40), num_groups=2, host=(20, 20), disk=(40, 40), folder=str(tmp_path))
    for owner in range(2):  # the second drives the first out of group 0, and only there
        tokens = prompt(4 * B, owner)
        kv.admit(owner, tokens)
        assert kv.extend(owner, len(tokens))
        kv.commit(owner, tokens, len(tokens))
        kv.release(owner)
    copies = kv.take_copies()
    being_filled = {(group, target) for _, group, _, _, tier, target in copies.tolist() if tier == HOST}
    assert len(being_filled) == 4
    for _ in range(4):
        moves = kv.take_transfers().tolist()
        kv.check()
        assert not being_filled & {(group, source) for _, group, tier, source, *_ in moves if tier == HOST}
        kv.finish_copies([move[0] for move in moves])
    kv.finish_copies(copies[:, 0].tolist())
    while kv.copies_in_flight:
        kv.finish_copies(kv.take_transfers()[:, 0].tolist())
    kv.check()
    assert [disk.num_cached for disk in kv.store.tier(DISK)] == [8, 8]
    kv.close()
