"""Requests that wait for their grammars, which the engine compiles beside its steps, each once for all."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from headrace.scheduler.commands import Commands
from headrace.scheduler.queue import WaitingQueue
from headrace.scheduler.request import Waiting
from headrace.types import Request

COMPILE = "compile_grammar"
LIMIT_S = 60.0
TOO_LONG = f"the grammar took longer than {LIMIT_S:.0f} s to compile: simplify it"
MAX_KNOWN = 64
"""Grammars that the engine has certainly not forgotten; it keeps more."""

Key = tuple[str, str]


class Failed(NamedTuple):
    request_id: int
    error: str
    param: str
    """The caller's field that is at fault."""


class Grammars:
    def __init__(self, queue: WaitingQueue, commands: Commands) -> None:
        self._queue = queue
        self._commands = commands
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._waiting: dict[Key, list[Request]] = {}
        """By grammar that is being compiled."""
        self.failed: list[Failed] = []
        """Still in the queue; whoever owns their terminal states ends them."""

    def hold(self, waiting: Waiting, now_s: float) -> None:
        """Before it is queued: a request whose grammar is not compiled waits."""
        grammar = waiting.request.grammar
        if grammar is None:
            return
        key = grammar.kind, grammar.spec
        if key in self._known:
            self._known.move_to_end(key)
            return
        waiting.hold("grammar", now_s + LIMIT_S)
        if key in self._waiting:
            self._waiting[key].append(waiting.request)
            return
        self._waiting[key] = [waiting.request]
        args = {"kind": grammar.kind, "spec": grammar.spec}
        self._commands.begin(COMPILE, args, lambda result: self._compiled(key, result))

    def _compiled(self, key: Key, result: dict[str, Any]) -> None:
        """result: `error` is "" when all is well."""
        requests, error = self._waiting.pop(key), str(result["error"])
        if error:
            for request in requests:
                assert request.grammar is not None
                self.failed.append(Failed(request.id, error, request.grammar.param))
            return
        self._known[key] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        for request in requests:
            self._queue.release(request.id, "grammar")

    def take_failed(self) -> list[Failed]:
        failed, self.failed = self.failed, []
        return failed
