"""64 seats that always have a request under way, and a judge over every answer."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.runtime.core import Core
from headrace.types import Delta, Request, Retention, RetentionRange, Sampling
from tests.canary.model import FILLERS, NUM_SEATS, words_of
from tests.twin.harness import request, run, tokens_of

MAX_STEPS_IDLE = 5000


@dataclass(frozen=True)
class Case:
    """A prompt of one seat, and what it is answered when it is alone."""

    seat: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make_cases(core: Core, *, per_seat: int, seed: int = 0) -> list[Case]:
    """`core`: without reuse, one plan at a time. Each prompt runs alone."""
    rng = random.Random(seed)
    systems = [[rng.choice(FILLERS) for _ in range(length)] for length in (0, 0, 7, 13, 22)]
    cases: list[Case] = []
    for seat in range(NUM_SEATS):
        for _ in range(per_seat):
            user = [rng.choice(words_of(seat) if rng.random() < 0.6 else FILLERS) for _ in range(rng.randint(2, 14))]
            prompt = [*rng.choice(systems), *user]
            alone = run(core, [request(1, prompt, max_tokens=rng.randint(1, 8))])[1]
            cases.append(Case(seat, tuple(prompt), tuple(tokens_of(alone))))
    return cases


@dataclass
class Live:
    case: Case
    request: Request
    got: list[int] = field(default_factory=list)
    aborted: bool = False


class Traffic:
    """Random arrivals, salts, retention and aborts over one core."""

    def __init__(self, core: Core, cases: Sequence[Case], *, seed: int = 0, abort_rate: float = 0.02) -> None:
        self.core = core
        self.random = random.Random(seed)
        self.abort_rate = abort_rate
        self.by_seat = [[case for case in cases if case.seat == seat] for seat in range(NUM_SEATS)]
        self.live: dict[int, Live] = {}
        self.known: dict[str, Counter[tuple[int, ...]]] = {}
        """By salt: all prefixes of what was asked or answered under it, and how often."""
        self.num_answers = 0
        self.moves: Counter[tuple[int, int]] = Counter()
        """By (source tier, destination tier)."""
        self.seen: Counter[str] = Counter()
        self._next_id = 1

    def run(self, num_answers: int) -> None:
        idle = 0
        while self.num_answers < num_answers or self.live:
            before = self.num_answers
            if self.num_answers < num_answers:
                self._fill_seats()
            self._abort_some()
            busy = self._step()
            idle = 0 if busy or self.num_answers > before else idle + 1
            if not busy:
                time.sleep(0.0005)  # a transfer is under way
            assert idle < MAX_STEPS_IDLE, f"stuck with {len(self.live)} requests"

    def _fill_seats(self) -> None:
        taken = {live.case.seat for live in self.live.values()}
        for seat in range(NUM_SEATS):
            if seat not in taken and self.random.random() < 0.5:
                self._send(self.random.choice(self.by_seat[seat]))

    def _send(self, case: Case) -> None:
        rng, number = self.random, self._next_id
        self._next_id += 1
        salt = rng.choice(["", "", "team", f"only {number}"])
        kept = RetentionRange(0, None, rng.choice([0, 20, 35, 60, 100]), rng.choice([None, 0.05]))
        made = request(
            number,
            case.prompt,
            max_tokens=len(case.answer),
            cache_salt=salt,
            sampling=Sampling(),
            retention=rng.choice([None, Retention(ranges=(kept,), decode_priority=rng.choice([10, 35, 80]))]),
        )
        self.live[number] = Live(case, made)
        self._learn(salt, case.prompt, 1)
        self.core.scheduler.add(made)

    def _abort_some(self) -> None:
        for number in list(self.live):
            if self.random.random() < self.abort_rate / 8:
                self.live[number].aborted = True
                self.core.scheduler.abort(number)
        self._receive(self.core.scheduler.take_deltas())

    def _step(self) -> bool:
        scheduler, engine = self.core.scheduler, self.core.engine
        plan = scheduler.plan(time.monotonic())
        self._receive(scheduler.take_deltas())
        if plan is not None:
            for section in plan.sections:
                self.moves.update((move[2], move[4]) for move in section.copies.tolist())
                self.moves.update((move[2], move[4]) for move in section.transfers.tolist())
            engine.submit(plan)
        if scheduler.num_in_flight <= (scheduler.settings.depth if plan is not None else 0):
            return plan is not None
        out = scheduler.commit(engine.collect())
        for number, token in zip(out.ids.tolist(), out.tokens.tolist(), strict=True):
            self._receive([Delta(id=number, tokens=[token])])
        self._receive(out.deltas)
        scheduler.check()
        return bool(plan is None or plan.num_rows)

    # ---- the judge ---------------------------------------------------------------------------

    def _receive(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            live = self.live[delta.id]
            live.got.extend(delta.tokens)
            if delta.finish is not None:
                self._judge(live, delta)
                del self.live[delta.id]

    def _judge(self, live: Live, end: Delta) -> None:
        case, asked = live.case, live.request
        assert end.finish == ("abort" if live.aborted else "length"), end
        mine = {*words_of(case.seat), *FILLERS}
        foreign = [token for token in live.got if token not in mine]
        assert not foreign, f"request {asked.id} of seat {case.seat} answers with the foreign words {foreign}"
        expected = list(case.answer)[: len(live.got)] if live.aborted else list(case.answer)
        assert live.got == expected, f"request {asked.id} answers {live.got} instead of {expected}"
        found = case.prompt[: end.cached_tokens]
        # It has asked for its own prefixes itself: once is nobody else.
        others = self.known[asked.cache_salt][found] - 1
        assert not found or others > 0, f"request {asked.id} found {len(found)} tokens of another salt's"
        self._learn(asked.cache_salt, (*case.prompt, *live.got), len(case.prompt) + 1)
        self.num_answers += 1
        self.seen["aborted" if live.aborted else "answered"] += 1
        self.seen["cached tokens"] += end.cached_tokens
        self.seen["words"] += len(live.got)

    def _learn(self, salt: str, tokens: tuple[int, ...], first: int) -> None:
        self.known.setdefault(salt, Counter()).update(tokens[:end] for end in range(first, len(tokens) + 1))
