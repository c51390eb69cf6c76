"""Whether the engine makes steps: what readiness means while the server is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.log import get

__all__ = ["Engine", "StallWatch"]

log = get("server")

LOOK_PERIOD_S = 0.5
ASK_PERIOD_S, LEAST_ASK_PERIOD_S = 10.0, 0.1
"""Between two questions whether the engine is there; a quarter of the limit otherwise."""


class Engine(Protocol):
    """What is known of it here."""

    @property
    def num_jobs(self) -> int | None:
        """Requests under way; None while no engine need be there."""
        ...

    @property
    def progress_s(self) -> float:
        """time.monotonic() when it last told of a step, or got something to do."""
        ...

    async def answer(self) -> None:
        """Returns when it has answered a question, which it does between two steps."""
        ...


class StallWatch:
    """With requests under way, steps are the sign of life. Questions are another: for an engine that has nothing to do,
    and for one that got stuck and whose clients have left since."""

    def __init__(self, engine: Engine, limit_s: float, *, on_stall: Callable[[], object]) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._asked_s: float | None = None
        """Since when a question waits."""

    def watchers(self) -> tuple[Awaitable[None], Awaitable[None]]:
        """To be run beside everything else, until they are cancelled."""
        return self._look(), self._ask()

    @property
    def is_stalled(self) -> bool:
        """For `limit_s` it has finished no step though requests run, or has answered nothing."""
        num_jobs = self._engine.num_jobs
        if num_jobs is None:
            return False
        now_s = time.monotonic()
        is_stuck = num_jobs > 0 and now_s - self._engine.progress_s > self._limit_s
        return is_stuck or (self._asked_s is not None and now_s - self._asked_s > self._limit_s)

    async def _look(self) -> None:
        """Every stall is told once, while it lasts and when it is over."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            if not self.is_stalled:
                continue
            self._on_stall()
            num_jobs = self._engine.num_jobs or 0
            what = f"no step for {self._limit_s:g} s while {num_jobs} requests run" if num_jobs else (
                f"the engine has answered nothing for {self._limit_s:g} s"
            )  # fmt: skip
            log.error("%s: the server is not ready", what)
            while self.is_stalled:
                await asyncio.sleep(LOOK_PERIOD_S)
            log.info("the engine has stopped" if self._engine.num_jobs is None else "the engine makes steps again")

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(min(max(self._limit_s / 4, LEAST_ASK_PERIOD_S), ASK_PERIOD_S))
            if self._engine.num_jobs is not None:
                self._asked_s = time.monotonic()
                await self._engine.answer()
                self._asked_s = None
