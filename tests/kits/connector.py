"""What every connector to an external block store has to do, over a device that is a few NumPy arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.transfer import KvCacheConnectorConfig
from headrace.seam import GroupSpec
from headrace.transfer.port import NO_BLOCK, BlockIds, ConnectorSetup, Finished, StoredRequest

SIZE = 4
NUM_BLOCKS = 16
GROUPS = (
    GroupSpec(layers=(0,), num_kv_heads=1, head_dim=2, dtype="float32"),
    GroupSpec(layers=(1,), num_kv_heads=1, head_dim=2, dtype="float32", window=6),
)
WAIT_S = 5.0


class FakeMemory:
    """Two groups of blocks, each block's bytes unlike all others."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.arenas = [random.integers(0, 256, (NUM_BLOCKS, 32 + 16 * at), np.uint8) for at in range(len(GROUPS))]

    def read(self, group: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self.arenas[group][list(blocks)]

    def write(self, group: int, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self.arenas[group][list(blocks)] = rows


def stored(request_id: int, tokens: Sequence[int], space: int = 0) -> StoredRequest:
    return StoredRequest(request_id, list(tokens), bytes([space]) * 32)


def _no_rows() -> None: ...


class Sides:
    """Both sides of one connector, and what travels between them."""

    def __init__(self, connector: Any, config: KvCacheConnectorConfig, *, seed: int = 0) -> None:
        setup = ConnectorSetup(config, GROUPS, SIZE)
        self.scheduler, self.worker, self.memory = connector.scheduler(setup), connector.worker(setup), FakeMemory(seed)
        self.worker.register_kv_caches(self.memory)

    def step(self, rows: Callable[[], None] = _no_rows) -> Finished:
        """Args: rows: what the plan computes."""
        meta = self.scheduler.build_connector_meta()
        if meta is not None:
            self.worker.wait_for_save(meta)
            self.worker.start_load_kv(meta)
        rows()
        return self.worker.get_finished()

    def save(self, request: StoredRequest, blocks: BlockIds) -> list[NDArray[np.uint8]]:
        """Computes and ends the request, and overwrites its blocks as soon as that is allowed. -> what they held"""
        held = [self.memory.read(group, mine) for group, mine in enumerate(blocks)]
        self.scheduler.blocks_computed(request, 0, blocks)
        waits = self.scheduler.request_finished(request, blocks)

        def overwrite() -> None:
            for group, mine in enumerate(blocks):
                self.memory.write(group, mine, np.zeros_like(held[group]))

        saved = list(self.step(_no_rows if waits else overwrite).saves)
        deadline_s = time.monotonic() + WAIT_S
        while waits and request.id not in saved:
            assert time.monotonic() < deadline_s, "a save is never reported"
            saved += self.step().saves
        assert saved == [request.id] * waits
        overwrite()
        return held

    def load(self, request: StoredRequest, first: int, blocks: BlockIds) -> bool:
        """-> whether it worked"""
        self.scheduler.update_state_after_alloc(request, first, blocks)
        deadline_s = time.monotonic() + WAIT_S
        while True:
            done = self.step()
            assert {*done.loads, *done.failed_loads} <= {request.id}
            if done.loads or done.failed_loads:
                assert len(done.loads) + len(done.failed_loads) == 1, "a load ends once"
                assert self.step() == Finished(), "nothing more is reported"
                return bool(done.loads)
            assert time.monotonic() < deadline_s, "a load is never reported"

    def matched(self, request: StoredRequest, num_computed: int = 0) -> int:
        """Asks as for a request that ends at once."""
        count = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert not self.scheduler.request_finished(request, ([], []))
        return count

    def close(self) -> None:
        for side in (self.scheduler, self.worker, self.worker):
            side.close()


def check_connector(connector: Any, config: KvCacheConnectorConfig) -> None:
    """
    Args:
        connector: has `scheduler` and `worker`, the classes of its sides; `config` names a store that is empty.
    """
    one, other = Sides(connector, config, seed=1), Sides(connector, config, seed=2)
    tokens = list(range(50, 63))
    assert one.matched(stored(1, tokens)) == 0
    held = one.save(stored(2, tokens), ([1, 2, 3], [4, 5, 6]))
    check_matches(other, tokens)
    check_loads(other, tokens, held)
    check_failures(one, tokens)
    one.close()
    other.close()


def check_matches(sides: Sides, tokens: list[int]) -> None:
    """Whole blocks behind what is computed, of these tokens in this namespace."""
    assert sides.matched(stored(10, tokens)) == 12
    assert sides.matched(stored(11, tokens), 4) == 8
    assert sides.matched(stored(12, tokens), 12) == 0
    assert sides.matched(stored(13, [*tokens[:9], 1, 2, 3, 4])) == 8
    assert sides.matched(stored(14, tokens[:7])) == 4
    assert sides.matched(stored(15, tokens[4:])) == 0, "a block is the same only behind the same prefix"
    assert sides.matched(stored(16, tokens, space=1)) == 0, "namespaces share nothing"


def check_loads(sides: Sides, tokens: list[int], held: list[NDArray[np.uint8]]) -> None:
    """The bytes are those that were saved; blocks that a group doesn't need stay away."""
    before = [arena.copy() for arena in sides.memory.arenas]
    request = stored(20, tokens)
    assert sides.scheduler.get_num_new_matched_tokens(request, 4) == 8
    assert sides.load(request, 1, ([7, 8], [NO_BLOCK, 9]))
    for group, filled in enumerate([{7: 1, 8: 2}, {9: 2}]):
        for block in range(NUM_BLOCKS):
            wanted = held[group][filled[block]] if block in filled else before[group][block]
            assert np.array_equal(sides.memory.arenas[group][block], wanted), (group, block)
    assert not sides.scheduler.request_finished(request, ([], []))


def check_failures(sides: Sides, tokens: list[int]) -> None:
    """What a failed request brought is not found; what others had brought stays."""
    longer = [*tokens[:12], *range(1, 9)]
    request = stored(30, longer)
    sides.scheduler.blocks_computed(request, 0, ([1, 2, 3, 4], [4, 5, 6, 7]))
    sides.step()
    sides.scheduler.blocks_computed(request, 4, ([5], [8]))
    sides.scheduler.request_failed(request)
    sides.step()
    assert sides.matched(stored(31, longer)) == 12
