"""Connectors keep their contract, are loaded by name, and can't hurt the engine."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import plugins
from headrace.config.transfer import KvCacheConnectorConfig
from headrace.seam import ExternalWork
from headrace.transfer._guard import WorkerGuard
from headrace.transfer._loading import load_scheduler, load_worker
from headrace.transfer.loopback import Loopback, LoopbackScheduler, LoopbackWorker, store_named
from headrace.transfer.port import ConnectorSetup, Finished, NoWorker
from tests.kits.connector import GROUPS, SIZE, Sides, check_connector, stored


def config(**changes: str) -> KvCacheConnectorConfig:
    names = {
        "connector_module": "headrace.transfer.loopback",
        "connector_scheduler_class": "LoopbackScheduler",
        "connector_worker_class": "LoopbackWorker",
    }
    return KvCacheConnectorConfig(**{**names, **changes})


@pytest.mark.parametrize("name", plugins.names("transfer"))
def test_contract(name: str) -> None:
    check_connector(plugins.load("transfer", name), config(server_url=f"contract of {name}"))


class Forgetful(LoopbackScheduler):
    """Takes the namespace for the same everywhere."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> int:
        return super().get_num_new_matched_tokens(stored(request.id, request.tokens), num_computed)


class Late(LoopbackWorker):
    """Saves what the blocks hold when it gets round to it."""

    late: Any = None

    def wait_for_save(self, meta: Any) -> None:
        self.late = meta

    def get_finished(self) -> Finished:
        if self.late is not None:
            super().wait_for_save(self.late)
        return super().get_finished()


@pytest.mark.parametrize(("scheduler", "worker"), [(Forgetful, LoopbackWorker), (LoopbackScheduler, Late)])
def test_the_contract_finds_faults(scheduler: type, worker: type) -> None:
    class Faulty:
        pass

    Faulty.scheduler, Faulty.worker = scheduler, worker  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError):
        check_connector(Faulty, config(server_url=f"{scheduler} {worker}"))


def test_stores_are_shared_by_name_while_somebody_uses_them() -> None:
    tokens = list(range(8))
    one, other = Sides(Loopback, config(server_url="a")), Sides(Loopback, config(server_url="b"))
    one.save(stored(1, tokens), ([1, 2], [1, 2]))
    assert Sides(Loopback, config(server_url="a")).matched(stored(2, tokens)) == 8
    assert other.matched(stored(2, tokens)) == 0
    store = store_named("a")
    assert store_named("a") is store and store_named("b") is not store
    del one, store
    assert Sides(Loopback, config(server_url="a")).matched(stored(3, tokens)) == 0


def test_what_was_forgotten_since_it_was_found_is_a_failed_load() -> None:
    tokens = list(range(8))
    sides = Sides(Loopback, config(server_url="forgotten"))
    sides.save(stored(1, tokens), ([1, 2], [1, 2]))
    request = stored(2, tokens)
    assert sides.scheduler.get_num_new_matched_tokens(request, 0) == 8
    sides.worker._store._blocks.popitem()
    assert not sides.load(request, 0, ([3, 4], [3, 4]))


# ---- loading -------------------------------------------------------------------------------------


class Half:
    def __init__(self, setup: ConnectorSetup) -> None: ...

    def build_connector_meta(self) -> None: ...


class Refusing(NoWorker):
    def __init__(self, setup: ConnectorSetup) -> None:
        raise OSError("no server")


def test_classes_are_found_by_their_names() -> None:
    setup = ConnectorSetup(config(), GROUPS, SIZE)
    assert isinstance(load_scheduler(setup), LoopbackScheduler)
    assert isinstance(load_worker(setup), LoopbackWorker)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"connector_module": "no.such"}, "connector_module: no.such can't be imported"),
        ({"connector_worker_class": "Nothing"}, "connector_worker_class: .* has no class Nothing"),
        ({"connector_module": __name__, "connector_worker_class": "Half"}, "Half lacks register_kv_caches, wait_for"),
        ({"connector_module": __name__, "connector_worker_class": "Refusing"}, r"can't be made \(OSError: no server\)"),
    ],
)
def test_what_is_wrong_with_a_connector_is_said(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"kv_connector_config.*{message}"):
        load_worker(ConnectorSetup(config(**changes), GROUPS, SIZE))


# ---- the guard -----------------------------------------------------------------------------------


class Scripted(NoWorker):
    def __init__(self, *, fails_at: str = "", finished: Finished | None = None) -> None:
        self.fails_at, self.finished, self.closed = fails_at, finished or Finished(), 0

    def _at(self, name: str) -> None:
        assert not self.closed, "called after close"
        if name == self.fails_at:
            raise RuntimeError("planned")

    def wait_for_save(self, meta: Any) -> None:
        self._at("wait_for_save")

    def start_load_kv(self, meta: Any) -> None:
        self._at("start_load_kv")

    def get_finished(self) -> Finished:
        self._at("get_finished")
        return self.finished

    def close(self) -> None:
        self.closed += 1


WORK = ExternalWork("meta", loads=((-1, 7), (-2, 8)), kept=((-3, 9),))


def begin_step(guard: WorkerGuard, work: ExternalWork) -> None:
    guard.save(work)
    guard.load(work)


def test_reports_are_by_copy_id() -> None:
    guard = WorkerGuard(Scripted(finished=Finished((7,), (8,), (9,))))
    begin_step(guard, WORK)
    assert guard.take_done() == [(-1, True), (-2, False), (-3, True)]


@pytest.mark.parametrize("fails_at", ["wait_for_save", "start_load_kv", "get_finished"])
def test_a_side_that_raises_owes_nothing(fails_at: str) -> None:
    port = Scripted(fails_at=fails_at)
    guard = WorkerGuard(port)
    begin_step(guard, WORK)
    assert sorted(guard.take_done()) == [(-3, True), (-2, False), (-1, False)] and port.closed
    begin_step(guard, ExternalWork("meta", loads=((-4, 10),)))
    assert guard.take_done() == [(-4, False)] and guard.take_done() == []


def test_reports_of_nobody_end_it_but_lose_nothing() -> None:
    guard = WorkerGuard(Scripted(finished=Finished((7, 1234))))
    begin_step(guard, WORK)
    assert sorted(guard.take_done()) == [(-3, True), (-2, False), (-1, True)]
