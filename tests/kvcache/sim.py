"""Random traffic on a KvCache: beside its twin, over a memory that knows which token each position was computed for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np

from headrace.kvcache.manager import KvCache, NoBlocks
from headrace.kvcache.settings import CacheSettings
from headrace.seam import GroupSpec, PoolSizes
from tests.kvcache.twin import Key, Twin

SALTS = ("", "a", "b")


def groups(count: int = 1) -> tuple[GroupSpec, ...]:
    return tuple(
        [GroupSpec((at,), num_kv_heads=1, head_dim=8, dtype="float32", bytes_per_token=4) for at in range(count)]
    )


def block_keys(kv: KvCache, group: int) -> list[Key]:
    """The cached blocks in eviction order, by what they hold."""
    index, pool = kv.index, kv.pools[group]
    keys: list[Key] = []
    for block in pool.eviction_order():
        node, edges = pool.node[block], b""
        while index.parent[node] >= 0:
            edges = index.key[node] + edges
            node = index.parent[node]
        keys.append((index.spaces[node].salt, tuple(np.frombuffer(edges, np.int32).tolist())))
    return keys


class Sim:
    def __init__(self, seed: int, *, tokens_per_block: int, num_blocks: tuple[int, ...], alphabet: int = 2) -> None:
        self.random = random.Random(seed)
        self.size = tokens_per_block
        self.alphabet = alphabet
        settings = CacheSettings(tokens_per_block=tokens_per_block, partial_reuse=False)
        self.kv = KvCache(groups(len(num_blocks)), PoolSizes(num_blocks, 0), settings)
        self.twin = Twin(tokens_per_block, [count - 1 for count in num_blocks])
        self.memory: list[dict[tuple[int, int], Key]] = [{} for _ in num_blocks]
        """By group, by (block, offset): the salt and the whole prefix the KV there was computed from."""
        self.num_computed: dict[int, int] = {}
        self.extra: list[tuple[int, int]] = []
        self.max_len = (min(num_blocks) - 1) * tokens_per_block
        self.next_owner = 0
        self.ended: deque[tuple[str, list[int]]] = deque(maxlen=8)
        self.seen: dict[str, int] = {}

    def run(self, num_steps: int) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (5, self.admit), (8, self.grow), (3, self.commit), (3, self.release), (2, self.fork), (2, self.lease),
            (2, self.unlease), (3, self.match),
        ]  # fmt: skip
        flat = [act for weight, act in acts for _ in range(weight)]
        for step in range(num_steps):
            act = self.random.choice(flat)
            act()
            if len(self.twin.owners) > (1 if step // 50 % 4 == 3 else 5):  # every fourth spell is a quiet one
                self.release()
            self.check(step)

    def check(self, step: int) -> None:
        kv, twin = self.kv, self.twin
        kv.check()
        stats = kv.stats
        for group in range(len(kv.groups)):
            cached = [block.key for block in twin.cached(group)]
            assert block_keys(kv, group) == cached, f"step {step}"
            assert stats.num_free[group] == twin.num_free(group), f"step {step}"
            assert stats.num_leased[group] == len(twin.leased(group)), f"step {step}"
        assert kv.num_available() == twin.num_available()
        if twin.owners:
            self.verify(self.pick())

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def pick(self) -> int:
        return self.random.choice(list(self.twin.owners))

    def prompt(self) -> tuple[str, list[int]]:
        """Often what another has or had, or a prefix of it; block edges are frequent."""
        length = self.random.choice(
            [self.size * self.random.randint(1, 6) + self.random.randint(-1, 1), self.size // 2]
        )
        length = max(1, min(length, self.max_len))
        tokens = [self.random.randrange(self.alphabet) for _ in range(length)]
        salt = self.random.choice(SALTS)
        others = [*self.ended, *((it.salt, it.tokens) for it in self.twin.owners.values())]
        if others and self.random.random() < 0.7:
            other_salt, other = self.random.choice(others)
            cut = self.random.choice([len(other), self.random.randint(0, len(other))])
            tokens = (other[:cut] + tokens)[: self.max_len]
            salt = other_salt if self.random.random() < 0.8 else salt
        return salt, tokens

    def match(self) -> None:
        salt, tokens = self.prompt()
        given = np.array(tokens, np.int32) if self.random.random() < 0.3 else tokens
        assert self.kv.match(given, claim=self.kv.claim(salt=salt)) == self.twin.match(salt, tokens) * self.size
        limit = self.random.randint(0, len(tokens))
        assert self.kv.match(given, claim=self.kv.claim(salt=salt), limit=limit) <= limit

    def admit(self) -> None:
        salt, tokens = self.prompt()
        headroom = self.random.choice([0, 0, 1, 3])
        num_tokens = min(len(tokens) + self.random.randint(0, self.size), self.max_len)
        can = self.kv.can_admit(tokens, claim=self.kv.claim(salt=salt), num_tokens=num_tokens, headroom=headroom)
        assert can == self.twin.can_admit(salt, tokens, num_tokens, headroom)
        reuse = self.random.random() < 0.9
        can = can and (
            reuse or self.kv.can_admit(tokens, claim=self.kv.claim(salt=salt), num_tokens=num_tokens, reuse=False)
        )
        if not can:
            self.count("refused")
            return
        owner = self.next_owner
        self.next_owner += 1
        found = self.kv.admit(owner, tokens, claim=self.kv.claim(salt=salt), reuse=reuse)
        assert found == self.twin.admit(owner, salt, tokens, reuse) * self.size
        assert found < len(tokens)
        self.count("hit" if found else "miss")
        self.num_computed[owner] = found
        self.verify(owner)
        assert self.kv.extend(owner, num_tokens) and self.twin.extend(owner, num_tokens)
        if reuse:
            assert self.kv.num_available() >= headroom
        self.announced(owner)
        self.compute(owner, len(tokens) if self.random.random() < 0.7 else self.random.randint(found, len(tokens)))

    def announced(self, owner: int) -> None:
        new = self.kv.take_new_blocks({owner: 7})
        for group, flat in enumerate(new):
            mine = self.kv.table(owner, group)
            first = len(mine) - len(flat) // 3
            assert flat == [value for at, block in enumerate(mine[first:], first) for value in (7, at, block)]
        assert not any(self.kv.take_new_blocks({owner: 7}))

    def compute(self, owner: int, end: int) -> None:
        """What a step does: writes KV into the owner's blocks, which nobody else may have."""
        it = self.twin.owners[owner]
        for group in range(len(self.kv.groups)):
            mine = self.kv.table(owner, group)
            for at in range(self.num_computed[owner], end):
                block = mine[at // self.size]
                sharers = [other for other in self.twin.owners if block in self.kv.tables[other].parts[group].blocks]
                assert sharers == [owner], f"owner {owner} writes into block {block} of {sharers}"
                self.memory[group][block, at % self.size] = it.salt, tuple(it.tokens[: at + 1])
        self.num_computed[owner] = max(self.num_computed[owner], end)

    def verify(self, owner: int) -> None:
        """Everything computed for the owner is still there."""
        it = self.twin.owners[owner]
        for group in range(len(self.kv.groups)):
            mine = self.kv.table(owner, group)
            for at in range(self.num_computed[owner]):
                held = self.memory[group][mine[at // self.size], at % self.size]
                assert held == (it.salt, tuple(it.tokens[: at + 1])), f"owner {owner} reads foreign KV at {at}"

    def grow(self) -> None:
        if not self.twin.owners:
            return
        owner = self.pick()
        it = self.twin.owners[owner]
        new = [self.random.randrange(self.alphabet) for _ in range(self.random.choice([0, 1, 1, 2, self.size]))]
        end = len(it.tokens) + len(new)
        room = self.kv.extend(owner, end)
        assert room == self.twin.extend(owner, end)
        if not room:
            self.count("full")
            return
        assert self.kv.num_tokens_capacity(owner) >= end
        it.tokens += new
        self.announced(owner)
        self.compute(owner, end if self.random.random() < 0.7 else self.random.randint(self.num_computed[owner], end))
        if self.random.random() < 0.7:
            self.commit_one(owner)

    def commit(self) -> None:
        if self.twin.owners:
            self.commit_one(self.pick())

    def commit_one(self, owner: int) -> None:
        self.kv.commit(owner, self.twin.owners[owner].tokens, self.num_computed[owner])
        self.twin.commit(owner, self.num_computed[owner])

    def release(self) -> None:
        if not self.twin.owners:
            return
        owner = self.pick()
        index = self.random.random() < 0.9
        self.count("released" if index else "failed")
        it = self.twin.owners[owner]
        self.ended.append((it.salt, it.tokens))
        self.kv.release(owner, index=index)
        self.twin.release(owner, index)
        del self.num_computed[owner]

    def fork(self) -> None:
        if not self.twin.owners:
            return
        parent, child = self.pick(), self.next_owner
        self.next_owner += 1
        num_tokens = self.num_computed[parent] - self.random.choice([0, 0, 1, self.size])
        if num_tokens < 1:
            return
        before = self.kv.stats
        try:
            copies = self.kv.fork(parent, child, num_tokens)
        except NoBlocks:
            assert not self.twin.fork(parent, child, num_tokens) and self.kv.stats == before
            self.count("no fork")
            return
        assert self.twin.fork(parent, child, num_tokens)
        assert len(copies) == (len(self.kv.groups) if num_tokens % self.size else 0)
        self.count("fork")
        self.num_computed[child] = num_tokens
        for group, source, target in copies:
            for offset in range(num_tokens % self.size):
                self.memory[group][target, offset] = self.memory[group][source, offset]
        self.announced(child)
        self.verify(child)

    def lease(self) -> None:
        group = self.random.randrange(len(self.kv.groups))
        cached = list(self.kv.pools[group].eviction_order())
        if cached and self.random.random() < 0.5:
            at = self.random.randrange(len(cached))
            real, slow = cached[at], self.twin.cached(group)[at]
        elif self.twin.owners:
            owner = self.pick()
            mine = self.kv.table(owner, group)
            if not mine:
                return
            at = self.random.randrange(len(mine))
            real, slow = mine[at], self.twin.owners[owner].blocks[group][at]
        else:
            return
        self.kv.store.lease(group, real)
        slow.leases += 1
        self.extra.append((group, real))
        self.twin.extra.append((group, slow))

    def unlease(self) -> None:
        if self.extra:
            at = self.random.randrange(len(self.extra))
            self.kv.store.unlease(*self.extra.pop(at))
            self.twin.unlease(at)

    def drain(self) -> None:
        """Ends everything; then nothing is leased."""
        while self.extra:
            self.unlease()
        for owner in list(self.twin.owners):
            self.kv.release(owner)
            self.twin.release(owner, True)
        self.check(-1)
        assert self.kv.stats.num_leased == (0,) * len(self.kv.groups)
