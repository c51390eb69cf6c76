"""What a connector to an external block store offers: a scheduler side and a worker side.

The scheduler side knows requests and block numbers, the worker side the memory. What one has to tell the other travels
with the next plan, as a value that nobody else looks into. The names are those of TensorRT-LLM's connector API; the
contract is narrower: whole blocks only, no hooks by layer (what is loaded is there before anybody computes on it), and
a load that fails is a miss. A table of block numbers has a list for each layer group, in which -1 is a block that the
group doesn't have or need there (out of its window).

A side that raises is closed and not called again; the cache goes on without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.config.transfer import KvCacheConnectorConfig
from headrace.seam import GroupSpec
from headrace.types import MediaSpan

NO_BLOCK = -1

BlockIds = tuple[list[int], ...]
"""Per layer group, the blocks of consecutive places of a sequence, or NO_BLOCK."""


@dataclass(frozen=True, slots=True)
class ConnectorSetup:
    """What both sides are made with."""

    config: KvCacheConnectorConfig
    groups: tuple[GroupSpec, ...]
    tokens_per_block: int
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StoredRequest:
    """A request as a store sees it. Blocks are the same only where namespace, tokens and media are."""

    id: int
    tokens: Sequence[int]
    """Grows as the request does."""
    namespace: bytes
    """Digest of weights, dtypes, shapes, adapter and salt; 32 bytes."""
    media: tuple[MediaSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Request ids, each once."""

    loads: tuple[int, ...] = ()
    failed_loads: tuple[int, ...] = ()
    """Whose blocks hold nothing that may be used."""
    saves: tuple[int, ...] = ()
    """Of requests for which `request_finished` was true."""


class KvMemory(Protocol):
    """The device's blocks."""

    arenas: Sequence[Any]
    """By group, a uint8 tensor [blocks, bytes]."""

    def read(self, group: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """[n, bytes], behind all that was computed before the call."""
        ...

    def write(self, group: int, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Before all that is computed after the call; the blocks are distinct."""
        ...


class SchedulerConnector(Protocol):
    """Made as `Class(setup: ConnectorSetup)`. Calls come from one thread, between steps: none may wait."""

    def get_num_new_matched_tokens(self, request: StoredRequest, num_computed: int) -> int:
        """Tokens that the store has behind the first `num_computed`, which are whole blocks. Once a request."""
        ...

    def update_state_after_alloc(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None:
        """The request waits for these blocks, from block `first` of its sequence on; maybe fewer than were offered.

        The worker side has to report the request as loaded or failed. Until then nobody else touches the blocks.
        """
        ...

    def blocks_computed(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None:
        """These blocks, from block `first` of its sequence on, hold the KV of the request's tokens for good."""
        ...

    def build_connector_meta(self) -> Any:
        """For the worker side, with the next plan: what was told since the last call. None is nothing."""
        ...

    def request_finished(self, request: StoredRequest, block_ids: BlockIds) -> bool:
        """The request has ended, with these whole blocks. True: they stay until the worker side reports it as saved."""
        ...

    def request_failed(self, request: StoredRequest) -> None:
        """What it computed must not be found any more. `request_finished` is not called."""
        ...

    def close(self) -> None: ...


class WorkerConnector(Protocol):
    """Made as `Class(setup: ConnectorSetup)`. All calls come from the worker's thread."""

    def register_kv_caches(self, memory: KvMemory) -> None:
        """Once, first."""
        ...

    def wait_for_save(self, meta: Any) -> None:
        """A plan begins. Computed blocks of this `meta` may be overwritten once this returns.

        But for those of requests whose `request_finished` was true.
        """
        ...

    def start_load_kv(self, meta: Any) -> None:
        """Begins the loads of this `meta`; they may go on beside the steps.

        After `wait_for_save` and after the plan's copies were queued, which may read what was in the blocks before:
        whoever writes from a stream of its own lets it wait for the current one.
        """
        ...

    def get_finished(self) -> Finished:
        """What has ended since the last call; called after every plan's rows are queued, and doesn't wait."""
        ...

    def close(self) -> None:
        """Returns when nothing of it touches the blocks any more; may be called twice."""
        ...


class NoWorker:
    """Nothing is stored."""

    def register_kv_caches(self, memory: KvMemory) -> None: ...

    def wait_for_save(self, meta: Any) -> None: ...

    def start_load_kv(self, meta: Any) -> None: ...

    def get_finished(self) -> Finished:
        return _NOTHING

    def close(self) -> None: ...


class NoScheduler:
    """Nothing is stored."""

    def get_num_new_matched_tokens(self, request: StoredRequest, num_computed: int) -> int:
        return 0

    def update_state_after_alloc(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None: ...

    def blocks_computed(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None: ...

    def build_connector_meta(self) -> Any:
        return None

    def request_finished(self, request: StoredRequest, block_ids: BlockIds) -> bool:
        return False

    def request_failed(self, request: StoredRequest) -> None: ...

    def close(self) -> None: ...


_NOTHING = Finished()
