"""A connector through the whole runtime: what one LLM has computed, another finds in the store."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.runtime.core import Core
from headrace.transfer.loopback import LoopbackScheduler, LoopbackWorker, Meta, store_named
from headrace.transfer.port import BlockIds, ConnectorSetup, Finished, StoredRequest
from headrace.types import Delta
from tests.twin.harness import BLOCK, VOCAB, open_runtime, request, run, tiny_gemma3, tiny_llama, tokens_of

DRAW = random.Random(5)
PROMPT = [DRAW.randrange(VOCAB) for _ in range(41)]
TAIL = [DRAW.randrange(VOCAB) for _ in range(6)]


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gemma3])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a store that nobody else uses, alive during the test."""
    held = store_named(request.node.name)
    yield request.node.name
    del held


def connector(store: str, *, module: str = "headrace.transfer.loopback", side: str = "Loopback") -> dict[str, str]:
    return {
        "connector_module": module,
        "connector_scheduler_class": f"{side}Scheduler",
        "connector_worker_class": f"{side}Worker",
        "server_url": store,
    }


def answers(
    model: Path, prompts: list[list[int]], *, each: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached tokens of each prompt, one after another, on an engine of its own; no block is left behind."""
    core = open_runtime(model, **settings)
    try:
        ended = [run(core, [request(at, ids, **(each or {}))])[at] for at, ids in enumerate(prompts, 1)]
        check_at_rest(core)
        return [tokens_of(deltas) for deltas in ended], [deltas[-1].cached_tokens for deltas in ended]
    finally:
        core.close()


def check_at_rest(core: Core) -> None:
    kv = core.scheduler.sections[0].kv
    assert not core.scheduler.has_work and not any(kv.stats.num_leased) and not kv.extra_leases


def test_another_llm_finds_the_prefix(model: Path, store: str) -> None:
    plain, none = answers(model, [PROMPT, PROMPT + TAIL])
    assert none[0] == 0
    settings = {"kv_connector_config": connector(store)}
    assert answers(model, [PROMPT], **settings) == (plain[:1], [0])
    assert answers(model, [PROMPT], **settings) == (plain[:1], [40])
    assert answers(model, [PROMPT + TAIL], **settings) == (plain[1:], [40])
    # What it has itself is not asked for again; what the last one computed has gone to the store as well.
    both, cached = answers(model, [PROMPT[:21], PROMPT + TAIL], **settings)
    assert (both[1:], cached) == (plain[1:], [20, 44])
    assert answers(model, [PROMPT + TAIL], **settings) == (plain[1:], [44])


def test_generated_tokens_are_found_too_and_prompts_in_chunks(model: Path, store: str) -> None:
    settings = {"kv_connector_config": connector(store), "max_num_tokens": 16}
    ((first,), _) = answers(model, [PROMPT], **settings)
    longer = [PROMPT + first + TAIL]
    plain, _ = answers(model, longer)
    # The last token that was generated has no KV.
    assert answers(model, longer, **settings) == (plain, [(len(PROMPT + first) - 1) // BLOCK * BLOCK])


def test_salts_share_nothing(model: Path, store: str) -> None:
    settings = {"kv_connector_config": connector(store)}
    one, other = {"cache_salt": "one"}, {"cache_salt": "other"}
    plain = answers(model, [PROMPT], each=one, **settings)[0]
    assert answers(model, [PROMPT], each=other, **settings) == (plain, [0])
    assert answers(model, [PROMPT], **settings) == (plain, [0])
    assert answers(model, [PROMPT], each=one, **settings) == (plain, [40])


def test_other_weights_share_nothing(store: str, tmp_path: Path) -> None:
    settings = {"kv_connector_config": connector(store)}
    one, other = tiny_llama(tmp_path / "one"), tiny_gemma3(tmp_path / "other")
    answers(one, [PROMPT], **settings)
    assert answers(other, [PROMPT], **settings)[1] == [0]


@pytest.mark.parametrize("policy", ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"])
@pytest.mark.parametrize("side", ["Loopback", "Slow"])
def test_many_at_once_in_a_small_pool(model: Path, store: str, side: str, policy: str) -> None:
    """Loads, kept blocks, evictions and preemptions at the same time: answers as without a store."""
    prompts = [[*PROMPT[: 8 + 4 * (at % 8)], at % VOCAB, *TAIL] for at in range(24)]
    plain, _ = answers(model, prompts)
    settings: dict[str, Any] = {
        "kv_connector_config": connector(store, module=HERE, side=side),
        "kv_cache_config": {"max_tokens": 160},
        "max_batch_size": 6,
        "scheduler_config": {"capacity_scheduler_policy": policy},
    }
    for _ in range(2):
        core = open_runtime(model, **settings)
        try:
            deltas = run(core, [request(at, ids) for at, ids in enumerate(prompts)], stagger=2)
            check_at_rest(core)
        finally:
            core.close()
        assert [tokens_of(deltas[at]) for at in range(len(prompts))] == plain
    assert sum(deltas[at][-1].cached_tokens for at in range(len(prompts))) > 0


# ---- connectors that fail, or take their time ----------------------------------------------------

HERE = __name__


class LostScheduler(LoopbackScheduler):
    """Promises what the worker then doesn't find."""


class LostWorker(LoopbackWorker):
    def _load(self, key: bytes, blocks: dict[int, int]) -> bool:
        for group, block in blocks.items():
            self._memory.write(group, [block], np.bitwise_not(self._memory.read(group, [block])))
        return False


class DyingScheduler(LoopbackScheduler):
    """Raises once it has been asked."""

    def update_state_after_alloc(self, request: StoredRequest, first: int, block_ids: BlockIds) -> None:
        raise RuntimeError("planned")


class DyingWorker(LoopbackWorker): ...


class CrashScheduler(LoopbackScheduler): ...


class CrashWorker(LoopbackWorker):
    def start_load_kv(self, meta: Meta) -> None:
        if meta.loads:
            raise RuntimeError("planned")


class SlowScheduler(LoopbackScheduler):
    """Blocks stay after a request's end until the worker has saved them, several steps later; loads take as long."""

    def __init__(self, setup: ConnectorSetup) -> None:
        super().__init__(setup)
        self.ended: list[int] = []

    def request_finished(self, request: StoredRequest, block_ids: BlockIds) -> bool:
        super().request_finished(request, block_ids)
        self.ended += [request.id] * bool(block_ids[0])
        return bool(block_ids[0])

    def build_connector_meta(self) -> Any:
        meta = super().build_connector_meta()
        ended, self.ended = self.ended, []
        return (meta or Meta(), ended) if meta is not None or ended else None


class SlowWorker(LoopbackWorker):
    def __init__(self, setup: ConnectorSetup) -> None:
        super().__init__(setup)
        self.queue: list[tuple[int, Finished]] = []
        self.step = 0

    def wait_for_save(self, meta: Any) -> None:
        super().wait_for_save(meta[0])

    def start_load_kv(self, meta: Any) -> None:
        super().start_load_kv(meta[0])
        self.queue.append((self.step + 5, Finished(saves=tuple(meta[1]))))

    def get_finished(self) -> Finished:
        self.step += 1
        done = super().get_finished()
        self.queue.append((self.step + 5, done))
        due = [each for at, each in self.queue if at <= self.step]
        self.queue = [entry for entry in self.queue if entry[0] > self.step]
        parts = zip(*((each.loads, each.failed_loads, each.saves) for each in due), strict=True)
        return Finished(*(tuple(sum(part, ())) for part in parts))


@pytest.mark.parametrize(("side", "cached"), [("Lost", 0), ("Dying", 0), ("Crash", 0), ("Slow", 40)])
def test_a_store_that_fails_or_is_slow(model: Path, store: str, side: str, cached: int) -> None:
    plain = answers(model, [PROMPT], kv_connector_config=connector(store))[0]
    settings = {"kv_connector_config": connector(store, module=HERE, side=side)}
    assert answers(model, [PROMPT, PROMPT], **settings) == (plain * 2, [cached, 40])


def test_aborted_while_its_blocks_come(model: Path, store: str) -> None:
    answers(model, [PROMPT], kv_connector_config=connector(store))
    core = open_runtime(model, kv_connector_config=connector(store, module=HERE, side="Slow"))
    scheduler, engine = core.scheduler, core.engine
    try:
        scheduler.add(request(1, PROMPT))
        deltas: list[Delta] = []
        for step in range(30):
            plan = scheduler.plan(time.monotonic())
            if plan is None:
                break
            engine.submit(plan)
            deltas += scheduler.commit(engine.collect()).deltas
            scheduler.check()
            if step == 1:
                assert scheduler.queue.num_ready == 0 and not scheduler.num_active
                scheduler.abort(1)
        assert [delta.finish for delta in deltas] == ["abort"]
        check_at_rest(core)
        assert max(core.scheduler.sections[0].kv.stats.num_cached) == 10, "what came is kept for others"
    finally:
        core.close()
