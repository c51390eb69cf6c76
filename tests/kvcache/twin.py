"""The slow, obvious twin of KvCache: prefixes as tuples, searches instead of indexes, one object a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

Key = tuple[str, tuple[int, ...]]
"""(salt, all tokens up to the block's end)."""


@dataclass(eq=False)
class Block:
    leases: int = 1
    key: Key | None = None
    used: int = 0
    """When it was last used, on the twin's clock."""


@dataclass(eq=False)
class Owner:
    salt: str
    tokens: list[int]
    blocks: list[list[Block]]  # by group, by index
    num_indexed: int
    num_found: int
    indexes: bool = True


@dataclass(eq=False)
class Twin:
    tokens_per_block: int
    num_total: list[int]
    named: list[dict[Key, Block]] = field(default_factory=list)
    owners: dict[int, Owner] = field(default_factory=dict)
    extra: list[tuple[int, Block]] = field(default_factory=list)
    clock: int = 0

    def __post_init__(self) -> None:
        self.named = [{} for _ in self.num_total]

    def key(self, salt: str, tokens: Sequence[int], at: int) -> Key:
        return salt, tuple(tokens[: (at + 1) * self.tokens_per_block])

    def leased(self, group: int) -> set[Block]:
        held = {block for owner in self.owners.values() for block in owner.blocks[group]}
        return held | {block for where, block in self.extra if where == group}

    def cached(self, group: int) -> list[Block]:
        """In eviction order."""
        return sorted((block for block in self.named[group].values() if not block.leases), key=lambda block: block.used)

    def num_free(self, group: int) -> int:
        return self.num_total[group] - len(self.leased(group)) - len(self.cached(group))

    def num_available(self) -> int:
        return min(total - len(self.leased(group)) for group, total in enumerate(self.num_total))

    def match(self, salt: str, tokens: Sequence[int]) -> int:
        at = 0
        while (at + 1) * self.tokens_per_block < len(tokens) and all(
            self.key(salt, tokens, at) in named for named in self.named
        ):
            at += 1
        return at

    def can_admit(self, salt: str, tokens: Sequence[int], num_tokens: int, headroom: int) -> bool:
        found = self.match(salt, tokens)
        wanted = max(-(-num_tokens // self.tokens_per_block), found)
        for group, total in enumerate(self.num_total):
            held = sum(self.named[group][self.key(salt, tokens, at)].leases > 0 for at in range(found))
            if total - len(self.leased(group)) - (wanted - held) < headroom:
                return False
        return True

    def admit(self, owner: int, salt: str, tokens: Sequence[int], reuse: bool) -> int:
        found = self.match(salt, tokens) if reuse else 0
        blocks = [[named[self.key(salt, tokens, at)] for at in range(found)] for named in self.named]
        for block in chain(*blocks):
            block.leases += 1
        self.owners[owner] = Owner(salt, list(tokens), blocks, found, found)
        return found

    def extend(self, owner: int, num_tokens: int) -> bool:
        mine = self.owners[owner].blocks
        count = max(0, -(-num_tokens // self.tokens_per_block) - len(mine[0]))
        if self.num_available() < count:
            return False
        for group in range(len(mine)):
            mine[group] += self.take(group, count)
        return True

    def take(self, group: int, count: int) -> list[Block]:
        for _ in range(count - self.num_free(group)):
            victim = self.cached(group)[0]
            assert victim.key is not None
            del self.named[group][victim.key]
            victim.key = None
        return [Block() for _ in range(count)]

    def commit(self, owner: int, num_computed: int) -> None:
        it = self.owners[owner]
        if not it.indexes:
            return
        for at in range(it.num_indexed, num_computed // self.tokens_per_block):
            key = self.key(it.salt, it.tokens, at)
            for group, named in enumerate(self.named):
                known, block = named.get(key), it.blocks[group][at]
                if known is None or (known is not block and not known.leases):
                    if known:
                        known.key = None
                    named[key], block.key = block, key
            it.num_indexed = at + 1

    def release(self, owner: int, index: bool) -> None:
        it = self.owners[owner]
        if not index and it.num_indexed > it.num_found:
            self.forget(self.key(it.salt, it.tokens, it.num_found))
        del self.owners[owner]
        for at in range(len(it.blocks[0]) - 1, -1, -1):
            for group, mine in enumerate(it.blocks):
                block = mine[at]
                block.leases -= 1
                if at < it.num_indexed:
                    key = self.key(it.salt, it.tokens, at)
                    known = self.named[group].setdefault(key, block)
                    known.key = key
                    self.use(known)
                self.use(block)

    def use(self, block: Block) -> None:
        if not block.leases:
            self.clock += 1
            block.used = self.clock

    def forget(self, top: Key) -> None:
        salt, prefix = top
        for it in self.owners.values():
            end = len(prefix) // self.tokens_per_block
            if it.salt == salt and it.num_indexed >= end and tuple(it.tokens[: len(prefix)]) == prefix:
                it.indexes, it.num_indexed = False, max(0, end - 1)
        for named in self.named:
            for key in [key for key in named if key[0] == salt and key[1][: len(prefix)] == prefix]:
                named.pop(key).key = None

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        it = self.owners[parent]
        full, rest = divmod(num_tokens, self.tokens_per_block)
        if rest and not self.num_available():
            return False
        blocks = [list(mine[:full]) for mine in it.blocks]
        for block in chain(*blocks):
            block.leases += 1
        num_indexed, num_found = min(it.num_indexed, full), min(it.num_found, full)
        new = Owner(it.salt, it.tokens[:num_tokens], blocks, num_indexed, num_found, it.indexes)
        self.owners[child] = new
        for group in range(len(blocks) if rest else 0):
            new.blocks[group] += self.take(group, 1)
        return True

    def unlease(self, at: int) -> None:
        _, block = self.extra.pop(at)
        block.leases -= 1
        if not block.leases:
            self.use(block)
