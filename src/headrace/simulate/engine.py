"""A modelled engine: the port over a clock that only it moves while a step runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace.seam import SAMPLE, EngineFacts, Ints, PoolSizes, Section, SectionResult, StepPlan, StepResult
from headrace.simulate.cost import Cost
from headrace.simulate.jitter import Floats, Jitter
from headrace.simulate.work import Ledger, Longs

NOTHING: Ints = np.zeros(0, np.int32)
START_S = 1.0
"""Where virtual time begins: 0.0 means "not yet" in the times of a request."""


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds

    def reach(self, time_s: float) -> None:
        """Wait until then; nothing if it is past."""
        self.now_s = max(self.now_s, time_s)


@dataclass(slots=True)
class Pending:
    done_s: float
    result: StepResult
    has_context: bool
    """It has rows that are no generation rows."""


class ModelledEngine:
    """Implements `seam.EnginePort`. Steps run one after another, each as long as `cost` says; the host's own time
    passes in `submit`, the rest in `collect`.

    Every token of a request is the same one, made of its id, so requests share what their prompts share and no more.
    A request must end by its length. Copies between tiers are there with their step and take no time.

    Args:
        seed: of how its steps vary, if they do.
    """

    def __init__(self, facts: EngineFacts, cost: Cost, clock: VirtualClock, *, seed: int = 0) -> None:
        self.facts = facts
        self.cost = cost
        self.clock = clock
        self.free_s = 0.0
        """When the device has done all that was submitted."""
        self.busy_s = 0.0
        self.ledger = Ledger(facts.groups, 0)
        self.queue: deque[Pending] = deque()
        """In the order of the plans."""
        self.num_steps = 0
        self._jitter = Jitter(cost.calibration.generation_spread, seed=seed)
        self._context_jitter = Jitter(cost.calibration.context_spread, seed=seed)
        self._token = np.zeros(0, np.int32)
        self._ones = np.ones(0, np.int32)

    def open(self) -> EngineFacts:
        return self.facts

    def allocate(self, sizes: PoolSizes) -> None:
        self.ledger = Ledger(self.facts.groups, sizes.num_slots)
        self._token = np.zeros(sizes.num_slots, np.int32)
        self._ones = np.ones(sizes.num_slots, np.int32)

    def submit(self, plan: StepPlan) -> None:
        section = plan.sections[0]
        assert len(plan.sections) == 1, "one section is modelled"
        for init in section.inits:
            self._token[init.slot] = self.token_of(init.request_id)
        jitter = self._context_jitter if section.num_context_rows else self._jitter
        seconds = float(self.cost.seconds(self.ledger.take(section))) * jitter.factor(self.num_steps)
        self.num_steps += 1
        self.clock.pass_by(self.cost.calibration.host_s)
        self.free_s = max(self.clock.now_s, self.free_s) + seconds
        self.busy_s += seconds
        self.queue.append(Pending(self.free_s, self._result(plan, section, seconds), section.num_context_rows > 0))

    def collect(self) -> StepResult:
        pending = self.queue.popleft()
        self.clock.reach(pending.done_s)
        return pending.result

    def close(self) -> None:
        self.queue.clear()

    @property
    def has_context(self) -> bool:
        """A step in flight computes prompts."""
        return any(pending.has_context for pending in self.queue)

    def token_of(self, request_id: int) -> int:
        return request_id % self.facts.vocab_size

    def decode_s(self, slots: Longs, num_steps: int) -> Floats:
        """The time of each of the next steps, if they have one generation row for each of these and nothing else."""
        seconds = self.cost.seconds(self.ledger.decode(slots, num_steps))
        return self._jitter.factors(self.num_steps, num_steps) * seconds

    def skip(self, slots: Longs, num_steps: int, *, done_s: list[float], free_s: float, busy_s: float) -> None:
        """So many decode steps of these slots have been worked out by somebody else.

        Args:
            done_s: when each of the results in flight will be there now.
        """
        self.ledger.length[slots] += num_steps
        self.num_steps += num_steps
        self.free_s = free_s
        self.busy_s += busy_s
        for time_s, pending in zip(done_s, self.queue, strict=True):
            pending.done_s = time_s

    def _result(self, plan: StepPlan, section: Section, seconds: float) -> StepResult:
        if section.num_context_rows:
            accepted = section.flags & SAMPLE
            tokens = self._token[section.slot[accepted > 0]]
        else:
            accepted, tokens = self._ones[: section.num_rows], self._token[section.slot]
        moved = NOTHING
        if len(section.copies) or len(section.transfers):
            moved = np.concatenate([section.copies[:, 0], section.transfers[:, 0]])
        done = {command.id: {"error": ""} for command in plan.commands}
        answer = SectionResult(accepted, tokens)
        return StepResult(plan.step, (answer,), finished_copies=moved, finished_commands=done, forward_s=seconds)
