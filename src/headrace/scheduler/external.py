"""The scheduler's side of an external block store: what it is asked and told, and what goes to its worker side."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable

from headrace.kvcache.claim import Claim
from headrace.kvcache.loads import Loads
from headrace.kvcache.manager import KvCache
from headrace.kvcache.radix import Namespace
from headrace.scheduler.request import Active, Waiting
from headrace.seam import DUMMY_BLOCK, ExternalWork
from headrace.transfer.port import NO_BLOCK, BlockIds, NoScheduler, SchedulerConnector, StoredRequest

log = logging.getLogger("headrace.scheduler")


class NoExternal:
    """There is no store."""

    @property
    def is_busy(self) -> bool:
        """Something is to be told with a plan, or to be heard of, even if there is nothing to compute."""
        return False

    def fetch(self, waiting: Waiting) -> bool:
        """Whether the request waits for blocks of the store, which are brought from now on."""
        return False

    def abandon(self, request_id: int) -> None:
        """The request waits no longer."""

    def take_arrived(self) -> list[int]:
        """Requests that need not wait any longer."""
        return []

    def finish(self, ids: list[int], failed: list[int]) -> None:
        """What the engine reports; ids of copies are ignored."""

    def computed(self, active: Active, num_computed: int) -> None:
        """The first tokens are computed for good; called before their blocks may leave the window."""

    def ended(self, request_id: int) -> None:
        """A request has ended without a slot."""

    def left(self, active: Active) -> None:
        """A request has ended, and is about to give its blocks back."""

    def take_work(self) -> ExternalWork | None:
        return None

    def close(self) -> None: ...


class External(NoExternal):
    """Over one section's cache. A connector that raises is closed and forgotten; loads under way are still awaited."""

    def __init__(self, kv: KvCache, port: SchedulerConnector, *, section: int = 0, num_sections: int = 1) -> None:
        self._kv = kv
        self._transit = Loads(kv.store, kv.tiers, kv.lookup, kv.promises, section=section, stride=num_sections)
        self._port = port
        self._size = kv.tokens_per_block
        self._told: dict[int, StoredRequest] = {}
        """What the connector knows and has not been told the end of."""
        self._num_offered: dict[int, int] = {}
        self._loads: list[tuple[int, int]] = []
        self._kept: list[tuple[int, int]] = []
        self._has_news = False

    @property
    def is_busy(self) -> bool:
        return self._has_news or self._transit.is_busy

    def fetch(self, waiting: Waiting) -> bool:
        if waiting.is_preempted or waiting.request.id in self._told:  # asked before
            return False
        tokens, claim, loads = waiting.tokens, waiting.claim, self._transit
        first = loads.num_known(tokens, claim)
        most = (len(tokens) - 1) // self._size - first
        if most < 1:
            return False
        request = self._request(waiting.request.id, tokens, claim)
        try:
            offered = self._port.get_num_new_matched_tokens(request, first * self._size)
            count = min(int(offered) // self._size, most)
        except Exception:
            self._break()
            return False
        load = loads.begin(request.id, tokens, claim, count) if count > 0 else None
        if load is None:
            return False
        try:
            self._port.update_state_after_alloc(request, load.first, load.blocks)
        except Exception:  # the worker side never hears of it
            self._break()
            loads.finish([load.id], worked=False)
            return True  # the wait ends with the next plan
        self._loads.append((load.id, request.id))
        self._has_news = True
        return True

    def abandon(self, request_id: int) -> None:
        self._transit.abandon(request_id)

    def take_arrived(self) -> list[int]:
        return self._transit.take_arrived()

    def finish(self, ids: list[int], failed: list[int]) -> None:
        self._transit.finish(failed, worked=False)
        self._transit.finish(ids)

    def computed(self, active: Active, num_computed: int) -> None:
        first, last = self._num_offered.get(active.request.id, 0), num_computed // self._size
        if first >= last:
            return
        self._num_offered[active.request.id] = last
        request = self._request(active.request.id, active.tokens, active.claim)
        blocks = self._blocks(active.request.id, first, last)
        self._tell(lambda: self._port.blocks_computed(request, first, blocks))

    def ended(self, request_id: int) -> None:
        self._num_offered.pop(request_id, None)
        request = self._told.pop(request_id, None)
        if request is not None:
            nothing: BlockIds = tuple([] for _ in self._kv.groups)
            self._tell(lambda: self._port.request_finished(request, nothing))

    def left(self, active: Active) -> None:
        request = self._told.pop(active.request.id, None)
        num_blocks = min(self._num_offered.pop(active.request.id, 0), active.num_computed // self._size)
        if request is None:
            return
        if active.finish == "error":
            self._tell(lambda: self._port.request_failed(request))
            return
        blocks = self._blocks(request.id, 0, num_blocks)
        if self._tell(lambda: self._port.request_finished(request, blocks)) and num_blocks:
            keep_id = self._transit.keep(self._kv.tables[request.id], num_blocks)
            self._kept.append((keep_id, request.id))

    def take_work(self) -> ExternalWork | None:
        if not self._has_news:
            return None
        self._has_news = False
        meta = self._tell(self._port.build_connector_meta)
        self._has_news = False
        if isinstance(self._port, NoScheduler):  # it has just failed: its worker side knows nothing of these
            self._transit.finish([load_id for load_id, _ in self._loads], worked=False)
            self._transit.finish([keep_id for keep_id, _ in self._kept])
            self._loads, self._kept = [], []
        if meta is None and not self._loads and not self._kept:
            return None
        work = ExternalWork(meta, tuple(self._loads), tuple(self._kept))
        self._loads, self._kept = [], []
        return work

    def close(self) -> None:
        try:
            self._port.close()
        except Exception:
            log.exception("the KV connector's scheduler side did not close")

    def _request(self, request_id: int, tokens: list[int], claim: Claim) -> StoredRequest:
        request = self._told.get(request_id)
        if request is None:
            request = StoredRequest(request_id, tokens, namespace_key(claim.space), claim.media)
            self._told[request_id] = request
        return request

    def _blocks(self, owner: int, first: int, last: int) -> BlockIds:
        parts = self._kv.tables[owner].parts
        return tuple(
            [block if block != DUMMY_BLOCK else NO_BLOCK for block in part.blocks[first:last]] for part in parts
        )

    def _tell(self, call: Callable[[], object]) -> object:
        self._has_news = True
        try:
            return call()
        except Exception:
            self._break()
            return None

    def _break(self) -> None:
        log.exception("the KV connector's scheduler side failed: nothing more is asked of it")
        self.close()
        self._port = NoScheduler()


def namespace_key(space: Namespace) -> bytes:
    """The same in every process, 32 bytes."""
    return hashlib.sha256(json.dumps(space).encode()).digest()


Connect = Callable[[KvCache, int], NoExternal]
"""Of a section's cache and the section's number."""


def no_external(kv: KvCache, section: int) -> NoExternal:
    return NoExternal()
