"""A modelled engine: the port over a clock that only it moves while a step runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from headrace.seam import SAMPLE, EngineFacts, PoolSizes, Section, SectionResult, StepPlan, StepResult
from headrace.simulate.cost import Cost
from headrace.simulate.work import Ledger, Longs

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


@dataclass(frozen=True, slots=True)
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
    """

    def __init__(self, facts: EngineFacts, cost: Cost, clock: VirtualClock) -> None:
        self.facts = facts
        self.cost = cost
        self.clock = clock
        self.free_s = 0.0
        """When the device has done all that was submitted."""
        self.busy_s = 0.0
        self.ledger = Ledger(facts.groups, 0)
        self.queue: deque[Pending] = deque()
        """In the order of the plans."""
        self._token = np.zeros(0, np.int32)

    def open(self) -> EngineFacts:
        return self.facts

    def allocate(self, sizes: PoolSizes) -> None:
        self.ledger = Ledger(self.facts.groups, sizes.num_slots)
        self._token = np.zeros(sizes.num_slots, np.int32)

    def submit(self, plan: StepPlan) -> None:
        section = plan.sections[0]
        assert len(plan.sections) == 1, "one section is modelled"
        for init in section.inits:
            self._token[init.slot] = self.token_of(init.request_id)
        seconds = float(self.cost.seconds(self.ledger.take(section)))
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

    def token_of(self, request_id: int) -> int:
        return request_id % self.facts.vocab_size

    def skip(self, slots: Longs, num_steps: int, *, done_s: list[float], free_s: float, busy_s: float) -> None:
        """So many decode steps of these slots have been worked out by somebody else.

        Args:
            done_s: when each of the results in flight will be there now.
        """
        self.ledger.length[slots] += num_steps
        self.free_s = free_s
        self.busy_s += busy_s
        self.queue = deque(replace(each, done_s=time_s) for time_s, each in zip(done_s, self.queue, strict=True))

    def _result(self, plan: StepPlan, section: Section, seconds: float) -> StepResult:
        accepted = (section.flags & SAMPLE).astype(np.int32)
        tokens = self._token[section.slot[accepted > 0]]
        moved = np.concatenate([section.copies[:, 0], section.transfers[:, 0]])
        done = {command.id: {"error": ""} for command in plan.commands}
        answer = SectionResult(accepted, tokens)
        return StepResult(plan.step, (answer,), finished_copies=moved, finished_commands=done, forward_s=seconds)
