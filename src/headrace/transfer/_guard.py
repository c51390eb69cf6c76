"""A connector's worker side as the engine uses it: whatever it does, what waits for it is answered."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.seam import ExternalWork
from headrace.transfer.port import KvMemory, NoWorker, WorkerConnector

log = logging.getLogger("headrace.transfer")


class WorkerGuard:
    """Turns request ids into copy ids. A side that raises is closed, and all it owes, now or later, has failed."""

    def __init__(self, port: WorkerConnector | None = None) -> None:
        self._port: WorkerConnector = NoWorker() if port is None else port
        self._is_broken = False
        self._loading: dict[int, int] = {}
        """By request: the copy id."""
        self._saving: dict[int, int] = {}

    def register(self, memory: KvMemory) -> None:
        try:
            self._port.register_kv_caches(memory)
        except Exception as error:
            raise ValueError(
                f"kv_connector_config.connector_worker_class: register_kv_caches failed ({type(error).__name__}:"
                f" {error})"
            ) from error

    def save(self, work: ExternalWork | None) -> None:
        """What comes before anybody who may overwrite the blocks."""
        if work is None:
            return
        self._saving.update((request, copy_id) for copy_id, request in work.kept)
        if work.meta is not None:
            self._call(self._port.wait_for_save, work.meta)

    def load(self, work: ExternalWork | None) -> None:
        """What comes behind the plan's copies: one of them may still read what a load is going to overwrite."""
        if work is None:
            return
        self._loading.update((request, copy_id) for copy_id, request in work.loads)
        if work.meta is not None:
            self._call(self._port.start_load_kv, work.meta)

    def take_done(self) -> list[tuple[int, bool]]:
        """(copy id, whether it worked) of what has ended since the last call."""
        done: list[tuple[int, bool]] = []
        try:
            finished = self._port.get_finished()
            for waiting, requests, worked in (
                (self._loading, finished.loads, True),
                (self._loading, finished.failed_loads, False),
                (self._saving, finished.saves, True),
            ):
                for request in requests:
                    done.append((waiting.pop(request), worked))
        except Exception:  # also of a request that nobody waits for
            self._break()
        if self._is_broken:
            done += [(copy_id, False) for copy_id in self._loading.values()]
            done += [(copy_id, True) for copy_id in self._saving.values()]
            self._loading, self._saving = {}, {}
        return done

    def close(self) -> None:
        try:
            self._port.close()
        except Exception:
            log.exception("the KV connector's worker side did not close")

    def _call(self, part: Callable[[object], None], meta: object) -> None:
        try:
            part(meta)
        except Exception:
            self._break()

    def _break(self) -> None:
        log.exception("the KV connector's worker side failed: nothing more is loaded or saved")
        self._is_broken = True
        self.close()
        self._port = NoWorker()
