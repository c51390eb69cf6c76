"""From request ids to the user requests that wait for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace import wire
from headrace.front.collector import BeamReceiver, Choice, Collector

__all__ = ["Dispatched", "Router"]


@dataclass(slots=True)
class Dispatched:
    """What one message of outputs did."""

    touched: list[Collector] = field(default_factory=list[Collector])
    """Collectors that got something, each once."""
    aborts: list[wire.Abort] = field(default_factory=list[wire.Abort])
    """To be sent up: sequences that ended here while the runtime still runs them."""


class Router:
    """Owns the request ids of one front end.

    `dispatch` is for one thread; `allocate`, `add` and `remove` may be called from others meanwhile. Whoever reads a
    collector's state from another thread holds `lock`.
    """

    def __init__(self, front: int = 0) -> None:
        self.front = front
        self.lock = threading.Lock()
        self._counter = itertools.count(1)
        self._receivers: dict[int, Choice | BeamReceiver] = {}
        self._waiting: dict[int, int] = {}  # id without any output yet -> its prompt tokens

    def allocate(self, count: int) -> list[int]:
        """New request ids of this front end."""
        base = self.front << wire.FRONT_SHIFT
        return [base | next(self._counter) for _ in range(count)]

    def add(self, collector: Collector) -> None:
        """Before its requests are submitted."""
        for receiver in collector.receivers:
            self._waiting[receiver.request_id] = len(collector.prompt)
            self._receivers[receiver.request_id] = receiver

    def remove(self, collector: Collector) -> list[int]:
        """Forget a collector; the ids that the runtime may still be running."""
        return [request_id for request_id in collector.request_ids if self._forget(request_id)]

    @property
    def num_waiting(self) -> int:
        """Sequences that have had no output yet."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(list(self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Sequences that have not ended, waiting ones included."""
        return len(self._receivers)

    def collectors(self) -> list[Collector]:
        return list({id(r.collector): r.collector for r in list(self._receivers.values())}.values())

    def dispatch(self, outputs: wire.Outputs) -> Dispatched:
        """Hand out tokens and deltas; what ended is forgotten."""
        with self.lock:
            touched = self._dispatch(outputs)
            done = Dispatched(list(touched.values()))
            stopped: list[int] = []
            orphaned: list[int] = []
            for collector in done.touched:
                self._close_ended(collector, stopped, orphaned)
        done.aborts += [wire.Abort(stopped, "stop")] if stopped else []
        done.aborts += [wire.Abort(orphaned)] if orphaned else []
        return done

    def fail_all(self, message: str) -> list[Collector]:
        """End everything with an error: the runtime is gone."""
        with self.lock:
            failed = self.collectors()
            for collector in failed:
                collector.fail(message)
                self.remove(collector)
        return failed

    def _dispatch(self, outputs: wire.Outputs) -> dict[int, Collector]:
        touched: dict[int, Collector] = {}
        receivers = self._receivers
        ids, tokens = outputs.plain
        for request_id, token in zip(ids.tolist(), tokens.tolist()):
            receiver = receivers.get(request_id)
            if receiver is not None:
                receiver.add_token(token)
                touched[id(receiver.collector)] = receiver.collector
        for delta in outputs.deltas:
            receiver = receivers.get(delta.id)
            if receiver is None:
                continue
            self._waiting.pop(delta.id, None)
            receiver.apply(delta)
            touched[id(receiver.collector)] = receiver.collector
            if delta.finish is not None:
                self._forget(delta.id)
        return touched

    def _close_ended(self, collector: Collector, stopped: list[int], orphaned: list[int]) -> None:
        """Sequences that ended on this side: by a stop string, or with a sibling that failed."""
        ended: Iterable[Choice] = (choice for choice in collector.choices if choice.finish is not None)
        for choice in ended:
            if self._forget(choice.request_id):
                (orphaned if collector.error else stopped).append(choice.request_id)

    def _forget(self, request_id: int) -> bool:
        self._waiting.pop(request_id, None)
        return self._receivers.pop(request_id, None) is not None
