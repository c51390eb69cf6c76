"""The simulated world: real scheduler and cache, the fake engine, random traffic, checks after each step.

The world owns the clock. What a request may find is told by a seed of the fake model: requests that must not share
blocks (another salt, adapter, or conversation under a policy) compute other numbers from the same tokens, so a block
that is shared all the same changes tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from headrace.engine.fake import FakeEngine
from headrace.engine.fake_memory import NO_STAMP, Alone, Disk, next_token, reference_embedding
from headrace.kvcache.manager import KvCache
from headrace.scheduler.scheduler import Scheduler
from headrace.seam import GroupSpec, StepPlan
from headrace.types import BeamSearch, Delta, MediaSpan, Request, Retention, RetentionRange, Sampling
from tests.sim.setup import BLOCK, Setup

VOCAB = 50
PLACEHOLDER = 0
"""The token that stands for a media item's content."""


@dataclass
class Told:
    """What the world knows of one request."""

    request: Request
    got: list[int] = field(default_factory=list)
    end: Delta | None = None
    aborted: bool = False
    limit: int = 0
    """Where prompt and output must end at the latest."""


class World:
    def __init__(self, setup: Setup, *, seed: int = 0, engine_class: type[FakeEngine] = FakeEngine) -> None:
        self.random = random.Random(seed)
        self.setup = setup
        self.disks = [Disk() for _ in range(setup.num_sections)]
        self.told: dict[int, Told] = {}
        self.steps = 0
        self.now_s = 1000.0
        self.moves: Counter[str] = Counter()
        """What plans asked for."""
        self.seen: Counter[str] = Counter()
        self.harms = ["none", "none", "cut", "flip"]
        """What may have happened to the index of a disk when the next process begins."""
        self._engine_class = engine_class
        self._prefixes = [[self.random.randrange(1, VOCAB) for _ in range(60)] for _ in range(2)]
        self._next_id = 1
        self._start()

    def _start(self) -> None:
        setup = self.setup
        self.engine = self._engine_class(
            vocab_size=VOCAB,
            groups=setup.groups,
            num_sections=setup.num_sections,
            tokens_per_block=BLOCK,
            seed=self.random.randrange(1 << 30),
            error_rate=setup.error_rate,
            failure_rate=setup.failure_rate,
            lateness=setup.lateness,
            disks=self.disks,
        )
        facts = self.engine.open()
        self.engine.allocate(setup.sizes)
        self.caches = [
            KvCache(facts.groups, setup.sizes, setup.cache, section=section, num_sections=setup.num_sections)
            for section in range(setup.num_sections)
        ]
        self.scheduler = Scheduler(setup.scheduler, self.caches)

    def restart(self) -> None:
        """The process dies at this moment; disks and their index stay."""
        self.told = {}  # the next process counts its requests from one again
        self._next_id = 1
        for cache in self.caches:
            cache.close()
        self.engine.close()
        self._damage()
        self._start()
        self.seen["restarts"] += 1

    def _damage(self) -> None:
        """The index of a disk may have lost its end, or have a wrong byte in it; a block may be unreadable."""
        rng = self.random
        if self.setup.sizes.disk_folder:
            for path in sorted(Path(self.setup.sizes.disk_folder).glob("*.index")):
                data = bytearray(path.read_bytes())
                harm = rng.choice(self.harms)
                if harm == "cut":
                    del data[max(0, len(data) - rng.randint(1, 300)) :]
                elif harm == "flip" and data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
        for disk in self.disks:
            for stamps in disk.stamps:
                stamps[rng.randrange(len(stamps))] = NO_STAMP

    # ---- requests ----------------------------------------------------------------------------

    def request(self, **changes: object) -> Request:
        rng = self.random
        fields: dict[str, object] = {
            "id": self._next_id,
            "prompt": self._prompt(),
            "sampling": Sampling(),
            "max_tokens": rng.randint(1, 30),
            "min_tokens": rng.choice([0, 0, 5]),
            "stop_ids": rng.choice([(), (), (3,), (5, 9)]),
            "priority": rng.random(),
            "arrival_s": self.now_s,
            "cache_salt": rng.choice(["", "", "", "", "a", "b"]),
            **changes,
        }
        self._next_id += 1
        return self._with_seed(Request(**fields))  # type: ignore[arg-type]

    def rich_request(self, **changes: object) -> Request:
        """Adapters, media, conversations, retention, pins, time-outs and prompt log-probabilities as well."""
        rng = self.random
        prompt = self._prompt()
        media = self._media(len(prompt)) if rng.random() < 0.35 else ()
        for span in media:
            prompt[span.start : span.start + span.length] = [PLACEHOLDER] * span.length
        fields: dict[str, object] = {
            "prompt": prompt,
            "media": media,
            "adapter": rng.choice([0, 0, 0, 0, 0, 7]),
            "conversation": rng.choice(["", "x", "y"]),
            **(self._next_turn() if rng.random() < 0.5 else {}),
        }
        prompt = cast("list[int]", fields["prompt"])
        fields |= {
            "retention": self._retention(len(prompt)) if rng.random() < 0.5 else None,
            "pin": f"pin {rng.randrange(6)}" if rng.random() < 0.03 else "",
            "timeout_s": rng.uniform(0.1, 5.0) if rng.random() < 0.05 else None,
            **changes,
        }
        if rng.random() < 0.05:
            fields.setdefault("sampling", Sampling(prompt_logprobs=0))
        elif not fields["pin"] and "beam" not in changes and rng.random() < 0.12:
            fields["pooling"] = rng.choice(["last", "mean"])
        return self.request(**fields)

    def _prompt(self) -> list[int]:
        """Often the beginning of what others ask."""
        rng = self.random
        tail = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 25))]
        return rng.choice(self._prefixes)[: rng.choice([0, 3, 4, 8, 17, 40, 60])] + tail

    def _next_turn(self) -> dict[str, object]:
        """A request that goes on from an earlier one, its answer included, or from a part of it."""
        rng = self.random
        earlier = self.told.get(self._next_id - rng.randint(1, 12))
        if earlier is None:
            return {}
        asked = earlier.request
        whole = asked.prompt + earlier.got
        whole = whole[: rng.choice([len(whole), len(whole), rng.randint(0, len(whole))])][:90]
        return {
            "prompt": whole + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 8))],
            "media": tuple(span for span in asked.media if span.start + span.length <= len(whole)),
            "adapter": asked.adapter,
            "conversation": asked.conversation,
            "cache_salt": asked.cache_salt,
        }

    def _media(self, num_tokens: int) -> tuple[MediaSpan, ...]:
        rng = self.random
        spans: list[MediaSpan] = []
        at = 0
        for start in (2, 6, 11, 20):
            length = rng.choice([1, 3, 6])
            if start >= at and start + length < num_tokens and rng.random() < 0.5:
                spans.append(MediaSpan(start, length, rng.choice([b"cat" * 8, b"dog" * 8])))
                at = start + length
        return tuple(spans)

    def _retention(self, num_tokens: int) -> Retention:
        rng = self.random
        cut = rng.randint(1, num_tokens)

        def part(start: int, end: int | None) -> RetentionRange:
            return RetentionRange(start, end, rng.choice([0, 20, 35, 60, 100]), rng.choice([None, 0.3, 3.0]))

        ranges = (part(0, cut), part(cut, None)) if cut < num_tokens else (part(0, None),)
        return Retention(
            ranges=ranges,
            decode_priority=rng.choice([0, 35, 90]),
            decode_duration_s=rng.choice([None, 0.5]),
        )

    def _with_seed(self, request: Request) -> Request:
        policy = self.setup.cache.reuse_policy
        alone = f"request {request.id} of life {self.seen['restarts']}"
        scope = {
            "all_reusable": "",
            "per_request": alone,
            "per_conversation": f"conversation {request.conversation}" if request.conversation else alone,
        }[policy]
        space = repr((request.cache_salt, request.adapter, scope)).encode()
        seed = int.from_bytes(hashlib.sha256(space).digest()[:7], "little")
        fields = {name: getattr(request.sampling, name) for name in Sampling.__struct_fields__}
        return replace_request(request, sampling=Sampling(**{**fields, "seed": seed}))

    def add(self, request: Request) -> Told:
        told = Told(request, limit=self.scheduler.sections[0].limit_of(request))
        self.told[request.id] = told
        self.engine.media[request.id] = request.media
        self.scheduler.add(request)
        self.receive(self.scheduler.take_deltas())
        return told

    def abort(self, request_id: int) -> None:
        self.told[request_id].aborted = True
        self.scheduler.abort(request_id)
        self.receive(self.scheduler.take_deltas())

    def unpin_one(self) -> None:
        names = [pin.name for pin in self.scheduler.pins()]
        if names:
            assert self.scheduler.unpin(self.random.choice(names))
            self.seen["unpinned"] += 1

    # ---- steps -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan until `depth` + 1 steps are in flight, then collect one. False: nothing was in flight."""
        self.now_s += self.random.choice([0.0, 0.01, 0.2])
        plan = self.scheduler.plan(self.now_s)
        self.receive(self.scheduler.take_deltas())
        if plan is not None:
            self.check_plan(plan)
            self.engine.submit(plan)
            if self.scheduler.num_in_flight <= self.setup.scheduler.depth:
                return True
        if not self.scheduler.num_in_flight:
            return False
        result = self.engine.collect()
        self.seen["failed transfers"] += len(result.failed_copies)
        out = self.scheduler.commit(result)
        for request_id, token in zip(out.ids.tolist(), out.tokens.tolist(), strict=True):
            self.receive([Delta(id=request_id, tokens=[token])])
        self.receive(out.deltas)
        self.scheduler.check()
        self.steps += 1
        self.seen["preempted"] += self.scheduler.counts.num_preempted
        return True

    def check_plan(self, plan: StepPlan) -> None:
        names = ("device", "host", "disk")
        for section in plan.sections:
            assert section.num_step_tokens <= self.setup.scheduler.max_num_tokens
            assert section.num_rows <= self.setup.scheduler.max_batch_size
            rows = section.slot.tolist()
            assert len(set(rows)) == len(rows), "a slot has two rows in one plan"
            for kind, moves in (("copy", section.copies), ("transfer", section.transfers)):
                self.moves.update(f"{kind} {names[move[2]]} to {names[move[4]]}" for move in moves.tolist())
            self.moves["restore"] += len(section.restores)
            self.moves["save"] += len(section.saves)

    def receive(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            told = self.told[delta.id]
            assert told.end is None, f"request {delta.id} got something after its end"
            told.got.extend(delta.tokens)
            assert 0 <= delta.cached_tokens < max(len(told.request.prompt), 1), "the last token is always computed"
            if delta.finish is not None:
                told.end = delta
                self.seen["prompt tokens"] += len(told.request.prompt)
                self.seen["cached tokens"] += delta.cached_tokens
                self.seen["ended"] += 1
                verify_tokens(told, self.setup.groups, pins=any(it.request.pin for it in self.told.values()))

    def drain(self, max_steps: int = 1_500) -> None:
        for _ in range(max_steps):
            if not self.step() and not self.scheduler.has_work:
                return
        before = self.moves.copy()
        for _ in range(200):
            self.step()
        waiting, active, moves = len(self.scheduler.queue), self.scheduler.num_active, dict(self.moves - before)
        busy = [dict(cache.tiers._moves) for cache in self.caches]
        raise AssertionError(f"{waiting} waiting, {active} active: stuck; moves in 200 steps: {moves}; {busy}")

    def verify(self) -> None:
        """Every request ended; nobody but the pins holds a block."""
        for told in self.told.values():
            assert told.end is not None, f"request {told.request.id} never ended"
        for cache in self.caches:
            cache.check()
            assert sum(cache.stats.num_leased) == cache.stats.pinned_blocks, "blocks are leased when idle"
            num_pinned = sum(cache.pins.num_pinned)  # on any tier
            assert len(cache.extra_leases) == num_pinned, f"held when idle: {cache.extra_leases}, {num_pinned} pinned"


def verify_tokens(told: Told, groups: Sequence[GroupSpec], *, pins: bool = False) -> None:
    """Exactly the tokens of the definition, and a finish that they deserve."""
    request, end = told.request, told.end
    assert end is not None
    if request.beam is not None:
        return
    if request.pooling:
        verify_embedding(told, groups)
        return
    expected = expected_tokens(request, len(told.got), groups)
    assert told.got == expected, f"request {request.id}: {told.got} instead of {expected}"
    if end.finish == "stop":
        assert told.got[-1] in request.stop_ids and len(told.got) > request.min_tokens
    if end.finish == "length":
        length = len(request.prompt) + len(told.got)
        most = len(request.prompt) + request.max_tokens
        assert length == told.limit or (pins and length <= most), "pins come and go, and the limit with them"
    if end.finish == "abort":
        assert told.aborted
    if end.finish == "error":
        assert end.error == "injected fault" or end.error.startswith(("prompt:", "beam width", "pin")), end.error
    if end.finish == "timeout":
        assert request.timeout_s is not None


def verify_embedding(told: Told, groups: Sequence[GroupSpec]) -> None:
    request, end = told.request, told.end
    assert end is not None and told.got == [] and end.finish != "length"
    if end.finish == "stop":
        expected = reference_embedding(
            request.prompt, request.pooling, seed=request.sampling.seed, groups=groups, media=request.media
        )
        assert end.embedding == expected.tobytes(), f"request {request.id}: another embedding"
        assert end.cached_tokens == 0


def expected_tokens(request: Request, count: int, groups: Sequence[GroupSpec]) -> list[int]:
    """The definition with stop ids masked as long as min_tokens asks."""
    alone = Alone(groups, seed=request.sampling.seed, media=request.media)
    alone.feed(request.prompt)
    tokens: list[int] = []
    for at in range(count):
        token = next_token(alone.hidden, VOCAB)
        while at + 1 <= request.min_tokens and token in request.stop_ids:
            token = (token + 1) % VOCAB
        tokens.append(token)
        alone.feed([token])
        if token in request.stop_ids and at + 1 > request.min_tokens:
            break
    return tokens


def replace_request(request: Request, **changes: object) -> Request:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Request(**{**fields, **changes})  # type: ignore[arg-type]


def beam(width: int) -> BeamSearch:
    return BeamSearch(width=width, num_return=width)


__all__ = ["VOCAB", "World", "beam", "expected_tokens", "replace_request"]
