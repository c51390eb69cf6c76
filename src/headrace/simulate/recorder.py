"""A real engine whose steps are measured: what each computed and how long the device was taken by it."""

from __future__ import annotations

import time
from collections import deque

from headrace.bench.report import Step
from headrace.seam import EngineFacts, EnginePort, PoolSizes, StepPlan, StepResult
from headrace.simulate.work import Ledger, Work


class Recorder:
    """Implements `seam.EnginePort` over another engine. Times are those that `ModelledEngine` gives back: a step begins
    when it is submitted or the one before is done, whichever is later."""

    def __init__(self, engine: EnginePort) -> None:
        self.steps: list[Step] = []
        self._engine = engine
        self._ledgers: list[Ledger] = []
        self._facts: EngineFacts | None = None
        self._flying: deque[tuple[float, float, Work]] = deque()
        """(submitted, host's time before it, work)"""
        self._done_s = 0.0

    def open(self) -> EngineFacts:
        self._facts = self._engine.open()
        return self._facts

    def allocate(self, sizes: PoolSizes) -> None:
        assert self._facts is not None
        groups, count = self._facts.groups, self._facts.num_sections
        self._ledgers = [Ledger(groups, sizes.num_slots) for _ in range(count)]
        self._engine.allocate(sizes)

    def submit(self, plan: StepPlan) -> None:
        works = [ledger.take(section) for ledger, section in zip(self._ledgers, plan.sections, strict=True)]
        self._engine.submit(plan)
        now_s = time.perf_counter()
        self._flying.append((now_s, now_s - self._done_s, max(works, key=lambda work: work.num_tokens)))

    def collect(self) -> StepResult:
        result = self._engine.collect()
        now_s = time.perf_counter()
        submitted_s, host_s, work = self._flying.popleft()
        seconds = now_s - max(submitted_s, self._done_s)
        self._done_s = now_s
        if work.num_rows:
            self.steps.append(_step(work, seconds, host_s))
        return result

    def close(self) -> None:
        self._engine.close()


def _step(work: Work, seconds: float, host_s: float) -> Step:
    return Step(
        num_rows=work.num_rows,
        num_tokens=work.num_tokens,
        num_sampled=work.num_sampled,
        pairs=[int(count) for count in work.pairs],
        reads=[int(count) for count in work.reads],
        seconds=seconds,
        host_s=host_s,
    )
