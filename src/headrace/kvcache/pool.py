"""The blocks of one layer group on one tier: who holds each, which are free, which is evicted next.

Every block but the dummy is in exactly one state:

    free    nobody holds it and the index doesn't name it; its id is on the free stack
    cached  nobody holds it but the index names it; it waits in the eviction queue
    leased  somebody holds it, whether the index names it or not

Eviction order is the lowest priority first and the least recently queued within a priority: one ring of blocks per
priority, threaded through two lists of integers, so that every operation on a block is O(1) whatever the pool's size.
(Lists, since CPython reads a list's item several times faster than an array's.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from headrace.seam import DUMMY_BLOCK
from headrace.types import DEFAULT_PRIORITY

MAX_PRIORITY = 100
NO_NODE = -1


@lru_cache(maxsize=4)
def _numbers(count: int) -> list[int]:
    """0 .. count - 1, not to be changed: pools of one size share the integers, of which a fleet has millions."""
    return list(range(count))


class BlockPool:
    """Block ids 1 .. `num_blocks` - 1; the dummy block 0 counts in `num_blocks` and is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        numbers = _numbers(num_blocks + MAX_PRIORITY + 1)
        self.free = numbers[num_blocks - 1 : DUMMY_BLOCK : -1]
        """A stack of block ids."""
        self.leases = [0] * num_blocks
        self.num_leases = 0
        """Of all blocks together."""
        self.node = [NO_NODE] * num_blocks
        """By block: the index node that names it, or NO_NODE."""
        self.priority = [DEFAULT_PRIORITY] * num_blocks
        self.num_cached = 0
        # The ring of priority p starts and ends at the position num_blocks + p, which is no block.
        self.next = numbers[:]
        self.prev = numbers[:]
        self.used = [0] * num_blocks
        """By block: the clock when it was last queued."""
        self.clock = 0
        self.passed: set[int] = set()
        """Cached blocks that a window has slid over and hardly anybody will ask for."""
        self.levels = 0
        """Bit p is set when the ring of priority p isn't empty."""

    @property
    def num_total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_leased(self) -> int:
        return self.num_blocks - 1 - len(self.free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `evict` and `take` can bring."""
        return len(self.free) + self.num_cached

    @property
    def num_shared(self) -> int:
        """Leases beyond the first one of each block."""
        return self.num_leases - self.num_leased

    def take(self, count: int) -> list[int]:
        """Hands out `count` free blocks with one lease each."""
        free = self.free
        assert count <= len(free), f"{count} blocks wanted, {len(free)} free"
        self.num_leases += count
        if count == 1:
            block = free.pop()
            self.leases[block] = 1
            return [block]
        split = len(free) - count
        blocks = free[split:]
        del free[split:]
        blocks.reverse()
        leases = self.leases
        for block in blocks:
            leases[block] = 1
        return blocks

    def take_these(self, blocks: Iterable[int]) -> None:
        """Hands out exactly these free blocks, with one lease each."""
        wanted = set(blocks)
        assert wanted <= set(self.free), "a block is not free"
        self.free = [block for block in self.free if block not in wanted]
        self.num_leases += len(wanted)
        for block in wanted:
            self.leases[block] = 1

    def evict(self, count: int) -> list[int]:
        """Frees the next `count` cached blocks; returns the nodes that named them, in that order."""
        assert count <= self.num_cached, f"{count} evictions wanted, {self.num_cached} blocks cached"
        after, before, node, free = self.next, self.prev, self.node, self.free
        nodes: list[int] = []
        for _ in range(count):
            lowest = self.levels & -self.levels
            end = self.num_blocks + lowest.bit_length() - 1
            block = after[end]
            second = after[block]
            after[end], before[second] = second, end
            after[block] = before[block] = block
            if second == end:
                self.levels ^= lowest
            nodes.append(node[block])
            node[block] = NO_NODE
            self.priority[block] = DEFAULT_PRIORITY
            free.append(block)
        if self.passed:
            self.passed.difference_update(free[len(free) - count :])
        self.num_cached -= count
        return nodes

    def lease(self, block: int) -> None:
        """One more holder of a leased or cached block."""
        count = self.leases[block]
        if not count:
            assert self.node[block] >= 0, f"block {block} is free: only `take` hands it out"
            self._unqueue(block)
            self.passed.discard(block)
        self.leases[block] = count + 1
        self.num_leases += 1

    def unlease(self, block: int) -> None:
        """One holder less; after the last one the block is cached when the index names it, else free."""
        count = self.leases[block] - 1
        assert count >= 0, f"block {block} has no lease to give back"
        self.leases[block] = count
        self.num_leases -= 1
        if not count:
            if self.node[block] >= 0:
                self._queue(block)
            else:
                self._set_free(block)

    def lease_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.lease(block)

    def unlease_all(self, blocks: Iterable[int]) -> None:
        """Gives one lease of each back; the first is the first to be evicted."""
        leases, node = self.leases, self.node
        blocks = list(blocks)
        self.num_leases -= len(blocks)
        for block in blocks:
            count = leases[block] - 1
            assert count >= 0, f"block {block} has no lease to give back"
            leases[block] = count
            if not count:
                if node[block] >= 0:
                    self._queue(block)
                else:
                    self._set_free(block)

    def unlease_first(self, block: int) -> None:
        """`unlease`; cached, it is the first of its priority to be evicted, and not worth a place in a lower tier."""
        self.unlease(block)
        if not self.leases[block] and self.node[block] >= 0:
            self.passed.add(block)
            self._unqueue(block)
            end = self.num_blocks + self.priority[block]
            first = self.next[end]
            used = self.used[first] if first != end else self.used[block]
            self._insert(block, before=first, used=used)

    def set_node(self, block: int, node: int) -> None:
        """The index names a leased block from now on."""
        assert self.leases[block] > 0 and self.node[block] < 0, f"block {block} is free or indexed already"
        self.node[block] = node

    def clear_node(self, block: int) -> None:
        """The index names the block no longer, its priority is over; a cached block becomes free."""
        assert self.node[block] >= 0, f"block {block} isn't indexed"
        if self.leases[block]:
            self.node[block] = NO_NODE
            self.priority[block] = DEFAULT_PRIORITY
        else:
            self._unqueue(block)
            self._set_free(block)

    def touch(self, block: int) -> None:
        """Makes a cached block the most recently used of its priority."""
        self._unqueue(block)
        self._queue(block)

    def set_priority(self, block: int, priority: int) -> None:
        """0 is evicted first. Lasts until the block loses its name; a cached block counts as just used."""
        assert 0 <= priority <= MAX_PRIORITY, priority
        queued = not self.leases[block]
        if queued:
            assert self.node[block] >= 0, f"block {block} is free"
            self._unqueue(block)
        self.priority[block] = priority
        if queued:
            self._queue(block)

    def put_back(self, block: int, used: int) -> None:
        """Makes a cached block as old as it was when `used` was read."""
        self._unqueue(block)
        end = self.num_blocks + self.priority[block]
        after = self.next[end]
        while after != end and self.used[after] < used:
            after = self.next[after]
        self._insert(block, before=after, used=used)

    def _insert(self, block: int, *, before: int, used: int) -> None:
        """Queues it before another one, or before the end of its ring."""
        last = self.prev[before]
        self.next[last] = self.prev[before] = block
        self.prev[block], self.next[block] = last, before
        self.levels |= 1 << self.priority[block]
        self.num_cached += 1
        self.used[block] = used

    def eviction_order(self) -> Iterator[int]:
        """The cached blocks, the next victim first."""
        levels = self.levels
        while levels:
            lowest = levels & -levels
            levels ^= lowest
            end = self.num_blocks + lowest.bit_length() - 1
            block = self.next[end]
            while block != end:
                yield block
                block = self.next[block]

    def _set_free(self, block: int) -> None:
        self.passed.discard(block)
        self.node[block] = NO_NODE
        self.priority[block] = DEFAULT_PRIORITY
        self.free.append(block)

    def _queue(self, block: int) -> None:
        level = self.priority[block]
        end = self.num_blocks + level
        last = self.prev[end]
        self.next[last] = block
        self.prev[block] = last
        self.next[block] = end
        self.prev[end] = block
        self.levels |= 1 << level
        self.num_cached += 1
        self.clock = self.used[block] = self.clock + 1

    def _unqueue(self, block: int) -> None:
        before = self.prev[block]
        after = self.next[block]
        assert before != block, f"block {block} isn't cached"
        self.next[before] = after
        self.prev[after] = before
        self.next[block] = self.prev[block] = block
        if before == after:  # only the ring's end is left
            self.levels &= ~(1 << (before - self.num_blocks))
        self.num_cached -= 1
