"""The recount has to notice planted faults: in the state, and in the code while traffic runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.kvcache.manager import KvCache
from headrace.kvcache.pool import NO_NODE, BlockPool
from headrace.kvcache.radix import Namespace, RadixIndex
from tests.kvcache.cases import make
from tests.kvcache.sim import Sim

B = 2


def busy() -> KvCache:
    """Owners 1 and 2 share two blocks; owner 3 is by itself; five blocks are cached; some are free."""
    kv = make(30, tokens_per_block=B)
    for owner, tokens in ((9, [7] * 10), (1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 2, 3, 4, 8, 8, 8]), (3, [5] * 6)):
        kv.admit(owner, tokens)
        assert kv.extend(owner, len(tokens))
        kv.commit(owner, tokens, len(tokens))
    kv.release(9)
    kv.check()
    return kv


def freed_early(kv: KvCache) -> None:
    kv.pools[0].free.append(kv.table(1)[-1])


def unleased_early(kv: KvCache) -> None:
    kv.pools[0].unlease(kv.table(1)[-1])


def lost_lease(kv: KvCache) -> None:
    kv.pools[0].leases[kv.table(1)[0]] -= 1


def leaked_lease(kv: KvCache) -> None:
    del kv.tables[3]


def leaked_extra_lease(kv: KvCache) -> None:
    kv.store.lease(0, kv.table(1)[0])
    kv.extra_leases.clear()


def double_free(kv: KvCache) -> None:
    kv.pools[0].free.append(kv.pools[0].free[0])


def lost_block(kv: KvCache) -> None:
    kv.pools[0].free.pop()


def dummy_handed_out(kv: KvCache) -> None:
    kv.pools[0].free.append(0)


def leased_in_queue(kv: KvCache) -> None:
    block = kv.table(3)[0]
    leases, kv.pools[0].leases[block] = kv.pools[0].leases[block], 1
    kv.pools[0].unlease(block)
    kv.pools[0].leases[block] = leases


def broken_ring(kv: KvCache) -> None:
    first, second, *_ = kv.pools[0].eviction_order()
    kv.pools[0].prev[second] = second if first != second else first


def wrong_count(kv: KvCache) -> None:
    kv.pools[0].num_cached += 1


def swapped_blocks(kv: KvCache) -> None:
    a, b = kv.tables[1].blocks[0], kv.tables[3].blocks[0]
    a[2], b[2] = b[2], a[2]


def swapped_order(kv: KvCache) -> None:
    mine = kv.tables[3].blocks[0]
    mine[0], mine[1] = mine[1], mine[0]


def swapped_partial_entry(kv: KvCache) -> None:
    """A foreign block that no node names, at another index."""
    kv.tables[3].blocks[0].append(kv.table(1)[3])
    kv.tables[3].blocks[0].append(kv.table(1)[3])


def wrong_name(kv: KvCache) -> None:
    kv.pools[0].node[kv.table(1)[0]], kv.pools[0].node[kv.table(3)[0]] = (
        kv.pools[0].node[kv.table(3)[0]],
        kv.pools[0].node[kv.table(1)[0]],
    )


def stale_name(kv: KvCache) -> None:
    kv.pools[0].node[kv.table(1)[0]] = NO_NODE


def lost_pin(kv: KvCache) -> None:
    kv.index.uses[kv.tables[3].cursor] -= 1


def cut_off(kv: KvCache) -> None:
    del kv.index.roots[kv.index.spaces.popitem()[1]]


def wrong_edge(kv: KvCache) -> None:
    fork = next(iter(kv.index.forks.values()))
    (a, x), (b, y), *_ = fork.items()
    fork[a], fork[b] = y, x


def wrong_parent(kv: KvCache) -> None:
    kv.index.parent[kv.tables[3].cursor] = kv.tables[1].cursor


def wrong_mark(kv: KvCache) -> None:
    kv.tables[3].num_indexed -= 1
    kv.tables[3].index_at -= B


def wrong_capacity(kv: KvCache) -> None:
    kv.tables[3].capacity += B


STATE_FAULTS: dict[Callable[[KvCache], None], str] = {
    freed_early: "is free with 1 leases",
    unleased_early: "0 leases, 1 are accounted for",
    lost_lease: "1 leases, 2 are accounted for",
    leaked_lease: "1 leases, 0 are accounted for",
    leaked_extra_lease: "3 leases, 2 are accounted for",
    double_free: "twice on the free stack",
    lost_block: "is lost",
    dummy_handed_out: "no such block",
    leased_in_queue: "cached with 1 leases",
    broken_ring: "broken at block",
    wrong_count: "5 blocks in the eviction queue, 6 counted",
    swapped_blocks: "the owner's tokens are at",
    swapped_order: "the owner's tokens are at",
    swapped_partial_entry: "2 leases|1 leases, 3|accounted for",
    wrong_name: "which names",
    stale_name: "which names node -1",
    lost_pin: "uses",
    cut_off: "cut off",
    wrong_edge: "isn't where its edge leads",
    wrong_parent: "its parent is",
    wrong_mark: "below a root|the owner's tokens are at",
    wrong_capacity: "capacity",
}


@pytest.mark.parametrize("fault", STATE_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_state_is_noticed(fault: Callable[[KvCache], None]):
    kv = busy()
    fault(kv)
    with pytest.raises(AssertionError, match=STATE_FAULTS[fault]):
        kv.check()


def shared_block_freed_early(patch: pytest.MonkeyPatch) -> None:
    """The first of several holders frees the block."""
    right = BlockPool.unlease

    def unlease(self: BlockPool, block: int) -> None:
        self.leases[block] = 1
        right(self, block)

    patch.setattr(BlockPool, "unlease", unlease)


def lease_of_a_hit_lost(patch: pytest.MonkeyPatch) -> None:
    right = BlockPool.lease

    def lease(self: BlockPool, block: int) -> None:
        if not self.leases[block]:
            right(self, block)

    patch.setattr(BlockPool, "lease", lease)


def freed_twice(patch: pytest.MonkeyPatch) -> None:
    right = BlockPool._set_free

    def set_free(self: BlockPool, block: int) -> None:
        right(self, block)
        if block == 3:
            self.free.append(block)

    patch.setattr(BlockPool, "_set_free", set_free)


def salt_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Namespace, "_replace", lambda self, **_: self)


def prefix_ignored(patch: pytest.MonkeyPatch) -> None:
    """Blocks are found by their own tokens, whatever stands before them."""
    right = RadixIndex.walk

    def walk(
        self: RadixIndex, space: Namespace, tokens: Any, max_blocks: int, media: Any = ()
    ) -> tuple[list[int], bytes]:
        path, _ = right(self, space, tokens, max_blocks)
        for at in range(len(path), max_blocks):
            same = [node for node, edge in enumerate(self.key) if edge == self.edge(tokens, at)]
            if not same:
                break
            path.append(same[0])
        return path, b""

    patch.setattr(RadixIndex, "walk", walk)


def indexed_too_early(patch: pytest.MonkeyPatch) -> None:
    right = KvCache.commit

    def commit(self: KvCache, owner: int, tokens: list[int], num_computed: int) -> None:
        right(self, owner, tokens, min(num_computed + 1, len(tokens)))

    patch.setattr(KvCache, "commit", commit)


def most_recent_evicted_first(patch: pytest.MonkeyPatch) -> None:
    def queue(self: BlockPool, block: int) -> None:
        end = self.num_blocks + self.priority[block]
        first = self.next[end]
        self.prev[first], self.next[block], self.prev[block], self.next[end] = block, first, end, block
        self.levels |= 1 << self.priority[block]
        self.num_cached += 1

    patch.setattr(BlockPool, "_queue", queue)


def partial_block_shared_by_forks(patch: pytest.MonkeyPatch) -> None:
    right = KvCache.fork

    def fork(self: KvCache, parent: int, child: int, num_tokens: int) -> list[tuple[int, int, int]]:
        copies = right(self, parent, child, num_tokens)
        for group, source, target in copies:
            self.pools[group].lease(source)
            self.pools[group].unlease(target)
            self.tables[child].parts[group].blocks[-1] = source
        return [(group, source, source) for group, source, _ in copies]

    patch.setattr(KvCache, "fork", fork)


CODE_FAULTS = [
    shared_block_freed_early, lease_of_a_hit_lost, freed_twice, salt_dropped, prefix_ignored, indexed_too_early,
    most_recent_evicted_first, partial_block_shared_by_forks,
]  # fmt: skip


@pytest.mark.parametrize("fault", CODE_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_code_is_noticed_by_traffic(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        Sim(3, tokens_per_block=2, num_blocks=(24, 20)).run(1500)


def test_the_same_traffic_without_a_fault():
    Sim(3, tokens_per_block=2, num_blocks=(24, 20)).run(1500)
