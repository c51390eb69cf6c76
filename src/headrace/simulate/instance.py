"""One simulated instance: the real loop, scheduler and cache over a modelled engine, with a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from headrace import wire
from headrace.runtime.core import open_core
from headrace.runtime.settle import Settled
from headrace.scheduler.scheduler import Outbox
from headrace.simulate.ahead import Ahead, look_ahead
from headrace.simulate.engine import ModelledEngine, VirtualClock
from headrace.simulate.model import Model
from headrace.simulate.tally import Tally
from headrace.simulate.work import Longs
from headrace.types import Delta, Request


@dataclass(slots=True)
class Inbox:
    """Implements `runtime.loop.Link`: messages wait here, time passes while there are none, tokens go to the tally."""

    clock: VirtualClock
    tally: Tally
    messages: list[wire.Up] = field(default_factory=list[wire.Up])
    ended: list[tuple[float, Delta]] = field(default_factory=list[tuple[float, Delta]])
    """Since somebody looked."""

    def receive(self, wait_s: float) -> Sequence[wire.Up]:
        messages, self.messages = self.messages, []
        if not messages:
            self.clock.pass_by(wait_s)
        return messages

    def send(self, outbox: Outbox, step: int) -> None:
        now_s = self.clock.now_s
        if len(outbox.ids):
            self.tally.add(outbox.ids, now_s)
        for delta in outbox.deltas:
            if delta.tokens:
                self.tally.add_one(delta.id, now_s)
            if delta.finish is not None:
                self.tally.end(delta, now_s)
                self.ended.append((now_s, delta))

    def reply(self, message: wire.Down) -> None:
        raise AssertionError("nobody asks a simulated instance anything")


class Instance:
    """`turn` and `put` are called in the order of time by who owns several of them.

    Args:
        number: tells it apart from others of a fleet.
        settled: of the model's arguments and facts.
        fast: work out runs of equal steps at once; the result is the same either way.
    """

    def __init__(self, model: Model, *, number: int = 0, settled: Settled | None = None, fast: bool = True) -> None:
        args = model.args
        self.clock = VirtualClock()
        self.engine = ModelledEngine(model.facts, model.cost, self.clock, seed=number)
        self.core = open_core(args, self.engine, clock=self.clock, settled=settled)
        self.inbox = Inbox(self.clock, Tally(0))
        self.loop = self.core.loop(args, self.inbox)
        self.version = 0
        """Changes when what was told to come next does not come."""
        self._fast = fast
        self._ahead: Ahead | None = None
        """Turns that come next, before a real one."""
        self._is_quiet = False

    @property
    def has_work(self) -> bool:
        return self._ahead is not None or bool(self.inbox.messages) or self.core.scheduler.has_work

    @property
    def next_s(self) -> float:
        """When `turn` is due."""
        ahead = self._ahead
        return self.clock.now_s if ahead is None else float(ahead.ends_s[-1])

    def begin(self, tally: Tally) -> None:
        """Of what comes from now on."""
        self.inbox.tally = tally

    def put(self, request: Request, now_s: float) -> None:
        """A request comes in; what was begun before is done first."""
        if self._ahead is not None:
            self._ahead = self._ahead.begun_before(now_s)
            self.version += 1
        elif not self.has_work:
            self.clock.reach(now_s)
        self.inbox.messages.append(wire.Submit([request]))

    def turn(self) -> list[tuple[float, Delta]]:
        """The turns that were known to come, and a real one: somebody has come or is about to end.

        Returns who ended, and when.
        """
        if self._ahead is not None:
            self._make(self._ahead)
        self._real_turn()
        if self._fast:
            self._ahead = look_ahead(self.core, self.engine, is_quiet=self._is_quiet)
        ended, self.inbox.ended = self.inbox.ended, []
        return ended

    def learn_from(self, other: Instance) -> None:
        """What that one's scheduler has measured of its steps."""
        scheduler = self.core.scheduler
        scheduler.pace = copy(other.core.scheduler.pace)
        for section in scheduler.sections:
            section.kv.set_prefill_speed(scheduler.pace.prefill_speed)

    def match(self, request: Request) -> int:
        """Tokens of the prompt that its cache would bring now."""
        kv = self.core.scheduler.sections[0].kv
        return kv.match(request.prompt, claim=kv.claim_of(request))

    def close(self) -> None:
        self.core.close()

    def _real_turn(self) -> None:
        came, scheduler, steps = bool(self.inbox.messages), self.core.scheduler, self.loop.steps
        self.loop.turn()
        made = self.loop.steps - steps
        self.inbox.tally.num_steps += made
        counts = scheduler.counts
        self._is_quiet = bool(made) and not (came or self.inbox.ended or counts.num_admitted or counts.num_preempted)

    def _make(self, ahead: Ahead) -> None:
        self._ahead = None
        ids: Longs = self.core.scheduler.sections[0].slots.request_id[ahead.rows]
        ahead.apply(self.core, self.engine)
        self.inbox.tally.add_run(ids, ahead.ends_s)
        self.loop.steps += ahead.num_turns
        self.inbox.tally.num_steps += ahead.num_turns
