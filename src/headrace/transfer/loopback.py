"""The example of a connector: a store in this process's memory. LLMs of one process with one `server_url` share it.

    kv_connector_config:
      connector_module: headrace.transfer.loopback
      connector_scheduler_class: LoopbackScheduler
      connector_worker_class: LoopbackWorker

Copies are made while the plan begins, on the worker's thread; a real store would move them to threads of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from headrace.transfer._keys import Chain
from headrace.transfer.port import NO_BLOCK, BlockIds, ConnectorSetup, Finished, KvMemory, StoredRequest

__all__ = ["Loopback"]

MAX_BLOCKS = 65_536
"""Of one store; beyond it what was used longest ago is forgotten."""

Rows = dict[int, NDArray[np.uint8]]
"""By layer group, the bytes of one block."""


class Store:
    """Blocks by key. Both sides of several LLMs use it, from threads of their own."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, Rows] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def put(self, key: bytes, rows: Rows) -> None:
        with self._lock:
            self._blocks[key] = rows
            self._blocks.move_to_end(key)
            if len(self._blocks) > MAX_BLOCKS:
                self._blocks.popitem(last=False)

    def get(self, key: bytes) -> Rows | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._blocks.pop(key, None)


_stores: WeakValueDictionary[str, Store] = WeakValueDictionary()
_stores_lock = threading.Lock()


def store_named(name: str) -> Store:
    """It lives as long as somebody uses it."""
    with _stores_lock:
        store = _stores.get(name)
        if store is None:
            store = _stores[name] = Store()
        return store


@dataclass(slots=True)
class Meta:
    """In the order in which the worker side does it."""

    forgotten: list[bytes] = field(default_factory=list[bytes])
    saves: list[tuple[bytes, dict[int, int]]] = field(default_factory=list[tuple[bytes, dict[int, int]]])
    """(key, block by group)."""
    loads: dict[int, list[tuple[bytes, dict[int, int]]]] = field(
        default_factory=dict[int, list[tuple[bytes, dict[int, int]]]]
    )
    """By request."""


class LoopbackScheduler:
    def __init__(self, setup: ConnectorSetup) -> None:
        self._store = store_named(setup.config.server_url or "")
        self._size = setup.tokens_per_block
        self._chains: dict[int, Chain] = {}
        self._offered: dict[int, list[bytes]] = {}
        """By request under way, the keys that it brought."""
        self._meta = Meta()

    def get_num_new_matched_tokens(self, request: StoredRequest, num_computed: int) -> int:
        chain, first = self._chain(request), num_computed // self._size
        at = first
        while (at + 1) * self._size <= len(request.tokens) and self._store.has(chain.key(at)):
            at += 1
        return (at - first) * self._size

    def update_state_after_alloc(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None:
        chain = self._chain(request)
        self._meta.loads[request.id] = [
            (chain.key(at), _held(blocks)) for at, blocks in enumerate(zip(*block_ids, strict=True), first)
        ]

    def blocks_computed(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None:
        chain = self._chain(request)
        for at, blocks in enumerate(zip(*block_ids, strict=True), first):
            key = chain.key(at)
            if NO_BLOCK not in blocks and not self._store.has(key):
                self._meta.saves.append((key, _held(blocks)))
                self._offered.setdefault(request.id, []).append(key)

    def build_connector_meta(self) -> Meta | None:
        meta, self._meta = self._meta, Meta()
        return meta if meta.forgotten or meta.saves or meta.loads else None

    def request_finished(self, request: StoredRequest, block_ids: BlockIds) -> bool:
        self._chains.pop(request.id, None)
        self._offered.pop(request.id, None)
        return False  # `wait_for_save` has saved by the time that it returns

    def request_failed(self, request: StoredRequest) -> None:
        doomed = set(self._offered.pop(request.id, ()))
        self._chains.pop(request.id, None)
        self._meta.saves = [save for save in self._meta.saves if save[0] not in doomed]
        self._meta.forgotten += doomed

    def close(self) -> None:
        self._chains.clear()

    def _chain(self, request: StoredRequest) -> Chain:
        if request.id not in self._chains:
            self._chains[request.id] = Chain(request, self._size)
        return self._chains[request.id]


def _held(blocks: tuple[int, ...]) -> dict[int, int]:
    return {group: block for group, block in enumerate(blocks) if block != NO_BLOCK}


class LoopbackWorker:
    def __init__(self, setup: ConnectorSetup) -> None:
        self._store = store_named(setup.config.server_url or "")
        self._loaded: list[int] = []
        self._failed: list[int] = []

    def register_kv_caches(self, memory: KvMemory) -> None:
        self._memory = memory

    def wait_for_save(self, meta: Meta) -> None:
        self._store.forget(meta.forgotten)
        for key, blocks in meta.saves:
            self._store.put(key, {group: self._memory.read(group, [block])[0] for group, block in blocks.items()})

    def start_load_kv(self, meta: Meta) -> None:
        for request_id, blocks in meta.loads.items():
            (self._loaded if all(self._load(*each) for each in blocks) else self._failed).append(request_id)

    def _load(self, key: bytes, blocks: dict[int, int]) -> bool:
        rows = self._store.get(key)
        if rows is None:  # forgotten since it was found
            return False
        for group, block in blocks.items():
            self._memory.write(group, [block], rows[group][None])
        return True

    def get_finished(self) -> Finished:
        finished = Finished(tuple(self._loaded), tuple(self._failed))
        self._loaded, self._failed = [], []
        return finished

    def close(self) -> None:
        """Nothing runs beside the steps."""


class Loopback:
    """Both sides, as a plug-in of this room names them."""

    scheduler = LoopbackScheduler
    worker = LoopbackWorker
