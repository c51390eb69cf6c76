"""A scheduler over the instant engine, one step at a time."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from headrace.engine.instant import InstantEngine
from headrace.kvcache.manager import KvCache
from headrace.kvcache.settings import CacheSettings
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.settings import SchedulerSettings
from headrace.seam import GroupSpec, PoolSizes, StepPlan, ints
from headrace.types import Delta, Request, Sampling

BASE = SchedulerSettings(max_batch_size=4, max_num_tokens=12, max_seq_len=256, num_slots=8, tokens_per_block=4, depth=0)


class Driver:
    def __init__(
        self,
        *,
        num_blocks: int | tuple[int, ...] = 100,
        specs: tuple[GroupSpec, ...] = (),
        host: int = 0,
        cache: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.engine = InstantEngine(vocab_size=100)
        settings = dataclasses.replace(BASE, **changes)
        groups = specs or self.engine.open().groups
        counts = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(groups)
        self.cache = KvCache(
            groups,
            PoolSizes(counts, settings.num_slots, (host,) * len(groups) if host else ()),
            CacheSettings(**{"tokens_per_block": 4, "reuse": settings.reuse, "partial_reuse": False, **(cache or {})}),
        )
        self.scheduler = Scheduler(settings, [self.cache])
        self.deltas: list[Delta] = []

    def add(self, request_id: int, length: int, *, holds: dict[str, float] | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {"max_tokens": 8, "sampling": Sampling(), "arrival_s": time.monotonic(), **changes}
        prompt = [(request_id * 13 + at) % 100 for at in range(length)]
        self.scheduler.add(Request(**{"id": request_id, "prompt": prompt, **fields}), holds=holds)

    def step(self) -> dict[int, int]:
        """-> tokens computed this step by request id."""
        plan = self.scheduler.plan(time.monotonic())
        computed = {} if plan is None else self.rows(plan)
        if plan is not None:
            self.engine.submit(plan)
            moved = ints(
                [move for section in plan.sections for move in (*section.copies[:, 0], *section.transfers[:, 0])]
            )
            result = dataclasses.replace(self.engine.collect(), finished_copies=moved)
            self.deltas.extend(self.scheduler.commit(result).deltas)
            self.scheduler.check()
        self.deltas.extend(self.scheduler.take_deltas())
        return computed

    def rows(self, plan: StepPlan) -> dict[int, int]:
        section = plan.sections[0]
        owners = self.scheduler.sections[0].slots.request_id[section.slot].tolist()
        return dict(zip(owners, section.num_tokens.tolist(), strict=True))

    def finish_of(self, request_id: int) -> str | None:
        ends = [delta.finish for delta in self.deltas if delta.id == request_id and delta.finish is not None]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def drain(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                self.deltas.extend(self.scheduler.take_deltas())
                return
            self.step()
        raise AssertionError("stuck")
