"""The simulated world: real scheduler and cache, the fake engine, random traffic, checks after each step."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field, replace

from headrace.engine.fake import FakeEngine, reference
from headrace.kvcache.manager import KvCache
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.settings import SchedulerSettings
from headrace.types import BeamSearch, Delta, Request, Sampling

VOCAB = 50


@dataclass
class Told:
    """What the world knows of one request."""

    request: Request
    expected: list[int]
    got: list[int] = field(default_factory=list)
    end: Delta | None = None
    aborted: bool = False
    limit: int = 0
    """Where prompt and output must end at the latest."""


def settings(**changes: object) -> SchedulerSettings:
    base = SchedulerSettings(
        max_batch_size=8, max_num_tokens=32, max_seq_len=200, num_slots=10, tokens_per_block=4, max_skips=4
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class World:
    def __init__(
        self,
        config: SchedulerSettings,
        *,
        num_blocks: int = 40,
        num_groups: int = 1,
        num_sections: int = 1,
        seed: int = 0,
        error_rate: float = 0.0,
        engine_class: type[FakeEngine] = FakeEngine,
    ) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.engine = engine_class(
            vocab_size=VOCAB,
            num_groups=num_groups,
            num_sections=num_sections,
            tokens_per_block=config.tokens_per_block,
            seed=seed,
            error_rate=error_rate,
        )
        facts = self.engine.open()
        blocks = (num_blocks,) * num_groups
        self.engine.allocate(blocks, config.num_slots)
        self.caches = [
            KvCache(facts.groups, tokens_per_block=config.tokens_per_block, num_blocks=blocks, reuse=config.reuse)
            for _ in range(num_sections)
        ]
        self.scheduler = Scheduler(config, self.caches)
        self.told: dict[int, Told] = {}
        self.steps = 0
        self._prefixes = [[self.random.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
        self._next_id = 1

    def request(self, **changes: object) -> Request:
        rng = self.random
        prefix = rng.choice(self._prefixes)[: rng.choice([0, 0, 3, 4, 8, 17, 40])]
        prompt = prefix + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))]
        salt = str(changes.get("cache_salt", rng.choice(["", "", "a", "b"])))
        request = Request(
            id=self._next_id,
            prompt=prompt,
            sampling=Sampling(seed={"": 0, "a": 1, "b": 2}[salt]),
            max_tokens=rng.randint(1, 30),
            min_tokens=rng.choice([0, 0, 5]),
            stop_ids=rng.choice([(), (), (3,), (5, 9)]),
            priority=rng.random(),
            arrival_s=time.monotonic(),
            cache_salt=salt,
        )
        request = replace_request(request, **changes)
        self._next_id += 1
        return request

    def add(self, request: Request) -> Told:
        told = Told(request, [], limit=self.scheduler.sections[0].limit_of(request))
        self.told[request.id] = told
        self.scheduler.add(request)
        self.receive(self.scheduler.take_deltas())
        return told

    def abort(self, request_id: int) -> None:
        self.told[request_id].aborted = True
        self.scheduler.abort(request_id)
        self.receive(self.scheduler.take_deltas())

    def step(self) -> bool:
        """Plan until `depth` + 1 steps are in flight, then collect one. False: nothing was in flight."""
        plan = self.scheduler.plan(time.monotonic())
        self.receive(self.scheduler.take_deltas())
        if plan is not None:
            self.check_plan(plan)
            self.engine.submit(plan)
            if self.scheduler.num_in_flight <= self.config.depth:
                return True
        if not self.scheduler.num_in_flight:
            return False
        out = self.scheduler.commit(self.engine.collect())
        for request_id, token in zip(out.ids.tolist(), out.tokens.tolist(), strict=True):
            self.receive([Delta(id=request_id, tokens=[token])])
        self.receive(out.deltas)
        self.scheduler.check()
        self.steps += 1
        return True

    def check_plan(self, plan) -> None:  # type: ignore[no-untyped-def]
        for section in plan.sections:
            assert section.num_step_tokens <= self.config.max_num_tokens
            assert section.num_rows <= self.config.max_batch_size
            rows = section.slot.tolist()
            assert len(set(rows)) == len(rows), "a slot has two rows in one plan"

    def receive(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            told = self.told[delta.id]
            assert told.end is None, f"request {delta.id} got something after its end"
            told.got.extend(delta.tokens)
            if delta.finish is not None:
                told.end = delta

    def drain(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.step() and not self.scheduler.has_work:
                return
        raise AssertionError(f"{len(self.scheduler.queue)} waiting, {self.scheduler.num_active} active: stuck")

    def verify(self) -> None:
        """Every request ended exactly once, with exactly the tokens of the definition."""
        for told in self.told.values():
            assert told.end is not None, f"request {told.request.id} never ended"
            verify_tokens(told)
        for cache in self.caches:
            cache.check()
            assert sum(cache.stats.num_leased) <= 2 * len(cache.extra_leases), "blocks are leased when idle"


def verify_tokens(told: Told) -> None:
    request, end = told.request, told.end
    assert end is not None
    if request.beam is not None:
        return
    expected = expected_tokens(request, len(told.got))
    assert told.got == expected, f"request {request.id}: {told.got} instead of {expected}"
    if end.finish == "stop":
        assert told.got[-1] in request.stop_ids and len(told.got) > request.min_tokens
    if end.finish == "length":
        assert len(request.prompt) + len(told.got) == told.limit
    if end.finish == "abort":
        assert told.aborted


def expected_tokens(request: Request, count: int) -> list[int]:
    """The reference with stop ids masked as long as min_tokens asks."""
    tokens: list[int] = []
    for at in range(count):
        token = reference(request.prompt + tokens, 1, vocab_size=VOCAB, seed=request.sampling.seed)[0]
        while at + 1 <= request.min_tokens and token in request.stop_ids:
            token = (token + 1) % VOCAB
        tokens.append(token)
        if token in request.stop_ids and at + 1 > request.min_tokens:
            break
    return tokens


def replace_request(request: Request, **changes: object) -> Request:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Request(**{**fields, **changes})  # type: ignore[arg-type]


def beam(width: int) -> BeamSearch:
    return BeamSearch(width=width, num_return=width)


__all__ = ["VOCAB", "World", "beam", "deque", "expected_tokens", "replace_request", "settings"]
