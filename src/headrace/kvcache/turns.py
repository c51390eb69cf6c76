"""Who may find a finished request's blocks: everybody, nobody, or the next turns of its conversation."""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque

from headrace.kvcache.radix import NONE, Namespace
from headrace.kvcache.settings import CacheSettings
from headrace.kvcache.store import Store
from headrace.types import Request

MAX_CONVERSATIONS = 10_000
"""Beyond it the one that was quiet for longest is no longer counted; its blocks age like others."""


class AllReusable:
    def scope_of(self, request: Request) -> str:
        return ""

    def ended(self, space: Namespace, node: int) -> None:
        """A request of this namespace has ended and holds nothing any more; `node` is its last whole block's."""


class PerRequest(AllReusable):
    """A preempted request finds its own blocks; nobody finds those of one that has ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._life = secrets.token_hex(8)
        """Request ids begin again in the next process, which may find this one's blocks on disk."""

    def scope_of(self, request: Request) -> str:
        return f"request {self._life} {request.id}"

    def ended(self, space: Namespace, node: int) -> None:
        root = self._store.index.roots.get(space, NONE)
        if root != NONE:
            self._store.forget(self._store.index.subtree(root))


class PerConversation(PerRequest):
    """The last turns of a conversation are kept; what belongs to none of them goes."""

    def __init__(self, store: Store, max_num_turns: int) -> None:
        super().__init__(store)
        self._max_num_turns = max_num_turns
        self._turns: OrderedDict[Namespace, deque[int]] = OrderedDict()
        """The pinned last nodes of each conversation's turns, the oldest first."""

    def scope_of(self, request: Request) -> str:
        if not request.conversation:
            return super().scope_of(request)
        return f"conversation {request.conversation}"

    def ended(self, space: Namespace, node: int) -> None:
        if space.scope.startswith("request "):
            super().ended(space, node)
            return
        store = self._store
        turns = self._turns.setdefault(space, deque())
        self._turns.move_to_end(space)
        turns.append(node)
        store.hold_node(node)
        if len(turns) > self._max_num_turns:
            self._drop(turns.popleft(), turns)
        if len(self._turns) > MAX_CONVERSATIONS:
            for end in self._turns.popitem(last=False)[1]:
                store.let_go(end)

    def _drop(self, end: int, kept: deque[int]) -> None:
        """Forgets the path to `end` as far as no kept turn passes there."""
        store, index = self._store, self._store.index
        stay: set[int] = set()
        for node in kept:
            while node != NONE and node not in stay:
                stay.add(node)
                node = index.parent[node]
        suffixes = [child for child in index.children(end) if len(index.key[child]) < 4 * index.tokens_per_block]
        node, doomed = end, suffixes
        while node not in stay:
            doomed.append(node)
            node = index.parent[node]
        index.pin(node)
        for each in doomed:
            for pool, blocks in enumerate(index.blocks):
                block = blocks[each]
                if block != NONE and not store.pools[pool].leases[block]:
                    store.unname(pool, each)
        store.let_go(end)
        index.unpin(node)


def policy_of(settings: CacheSettings, store: Store) -> AllReusable:
    if settings.reuse_policy == "per_request":
        return PerRequest(store)
    if settings.reuse_policy == "per_conversation":
        return PerConversation(store, settings.max_num_turns)
    return AllReusable()
