"""Fast-forwarding: many decode steps of the same rows worked out at once, and applied when it is known how many count.

Between two events (an arrival, an end, an admission, a chunk of a prompt) every turn of the loop plans the rows of the
turn before. What such turns change is known in closed form: each row has one more token a turn, blocks are taken as
rows outgrow theirs and named as they fill up. `look_ahead` finds how many such turns are certain to come and when each
ends; `Ahead.apply` leaves the scheduler, the cache, the engine and the clock as so many real turns would have.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.core import Core
from headrace.scheduler.section import SectionScheduler
from headrace.simulate.engine import ModelledEngine
from headrace.simulate.work import MAX_STEPS, Longs

Floats = NDArray[np.float64]

MAX_CELLS = 1 << 20
"""Steps times rows, where lengths are needed by row."""
MIN_STEPS = 3
"""Fewer are sooner made than worked out."""


@dataclass(slots=True)
class Ahead:
    """The next turns of one instance, none of which has been made."""

    rows: Longs
    """Slots, each with a generation row in every turn."""
    ends_s: Floats
    """When each turn ends: the next one begins there, and its tokens are out."""
    free_s: Floats
    """When the device is done with the step that each turn submits."""
    seconds: Floats
    """How long it works on that step."""
    begins_s: float
    due_s: list[float]
    """Of the results that are in flight now."""

    @property
    def num_turns(self) -> int:
        return len(self.ends_s)

    def begun_before(self, time_s: float) -> Ahead | None:
        """Those of the turns that begin before that; None: there are none."""
        if self.begins_s >= time_s:
            return None
        count = int(self.ends_s[:-1].searchsorted(time_s, "left")) + 1
        return Ahead(
            self.rows, self.ends_s[:count], self.free_s[:count], self.seconds[:count], self.begins_s, self.due_s
        )

    def apply(self, core: Core, engine: ModelledEngine) -> None:
        """Make them."""
        section = core.scheduler.sections[0]
        depth, num_turns = len(self.due_s), self.num_turns
        # Windows slide at each commit: more tokens in flight would need blocks that real turns don't.
        piece = num_turns if not section.kv.has_windows else max(section.settings.tokens_per_block - depth, 1)
        for start in range(0, num_turns, piece):
            _grow(section, engine, self.rows, min(piece, num_turns - start), depth=depth)
        due_s = [*self.due_s, *self.free_s[max(num_turns - depth, 0) :].tolist()]
        engine.skip(
            self.rows,
            num_turns,
            done_s=due_s[len(due_s) - depth :],
            free_s=float(self.free_s[-1]),
            busy_s=float(np.add.reduce(self.seconds)),
        )
        engine.clock.reach(float(self.ends_s[-1]))


def look_ahead(core: Core, engine: ModelledEngine, *, is_quiet: bool) -> Ahead | None:
    """The turns that are certain to come if no message does; None when there are fewer than MIN_STEPS.

    Args:
        is_quiet: the last turn was a real one in which nobody came, was admitted or ended, so whoever waits goes on
            waiting: until somebody ends there is never more room than then.
    """
    scheduler = core.scheduler
    if len(scheduler.queue) and not is_quiet:
        return None
    section = scheduler.sections[0]
    if section.prefilling or engine.has_context:
        return None
    rows = _steady_rows(section, scheduler.num_in_flight)
    if rows is None:
        return None
    slots = section.slots
    num_steps = min(int((slots.max_len[rows] - slots.length[rows]).min()) - 1, MAX_STEPS)
    if section.kv.has_windows:
        num_steps = min(num_steps, MAX_CELLS // len(rows))
    num_steps = _with_room(section, rows, num_steps, depth=scheduler.settings.depth)
    return _timed(engine, rows, num_steps) if num_steps >= MIN_STEPS else None


def _steady_rows(section: SectionScheduler, num_in_flight: int) -> Longs | None:
    """The rows of every plan in flight and of the next; None when they aren't the same, or there is other work."""
    slots, settings = section.slots, section.settings
    if section.beams or section.kv.copies_in_flight or section.external.is_busy:
        return None
    if num_in_flight != settings.depth or not settings.chained or settings.draft_len:
        return None
    rows = slots.generating.nonzero()[0]
    if not 0 < len(rows) <= settings.max_num_tokens or len(rows) != section.num_active:
        return None
    is_steady = not np.count_nonzero(slots.rows_in_flight != num_in_flight * slots.generating)
    return rows if is_steady else None


def _with_room(section: SectionScheduler, rows: Longs, num_steps: int, *, depth: int) -> int:
    """As many of these steps as there are blocks for, where nobody was promised any."""
    if not section.policy.may_preempt:
        return num_steps
    slots, size = section.slots, section.settings.tokens_per_block
    spare = section.kv.promises.unpromised()
    while num_steps >= MIN_STEPS:
        wanted = slots.length[rows] + num_steps - 1 + depth
        blocks = np.maximum(-(-wanted // size) - slots.capacity[rows] // size, 0)
        if int(blocks.sum()) <= spare:
            break
        num_steps //= 2
    return num_steps


def _timed(engine: ModelledEngine, rows: Longs, num_steps: int) -> Ahead:
    """As `submit` and `collect` let time pass."""
    seconds = engine.decode_s(rows, num_steps)
    begins_s, in_flight = engine.clock.now_s, [pending.done_s for pending in engine.queue]
    host_s = engine.cost.calibration.host_s
    if len(in_flight) == 1:
        # Where the device never waits for the host, it works without a gap, and turns end as its steps do.
        free_s = np.empty(num_steps + 1)
        free_s[0] = engine.free_s
        free_s[1:] = seconds
        np.add.accumulate(free_s, out=free_s)
        ends_s = free_s[:-1]
        if begins_s + host_s <= engine.free_s and not np.count_nonzero(ends_s[:-1] + host_s > ends_s[1:]):
            return Ahead(rows, ends_s, free_s[1:], seconds, begins_s, in_flight)
    ends, free = _one_by_one(begins_s, host_s, engine.free_s, deque(in_flight), seconds.tolist())
    return Ahead(rows, np.array(ends), np.array(free), seconds, begins_s, in_flight)


def _one_by_one(
    now_s: float, host_s: float, free_s: float, due: deque[float], seconds: list[float]
) -> tuple[list[float], list[float]]:
    """-> (when turns end, when the device is free)"""
    ends: list[float] = []
    free: list[float] = []
    for each in seconds:
        now_s += host_s
        free_s = max(now_s, free_s) + each
        due.append(free_s)
        now_s = max(now_s, due.popleft())
        free.append(free_s)
        ends.append(now_s)
    return ends, free


def _grow(section: SectionScheduler, engine: ModelledEngine, rows: Longs, num_turns: int, *, depth: int) -> None:
    """The rows are `num_turns` tokens longer: room, tokens and names in the index."""
    slots, kv, by_slot = section.slots, section.kv, section.slots.by_slot
    before = slots.length[rows]
    # What is in flight now counts as well; all of it is below every row's limit.
    needed = before + (num_turns - 1 + depth)
    short = (needed > slots.capacity[rows]).nonzero()[0]
    if len(short):
        stalled = section.make_room(rows[short], needed[short])
        assert not stalled, "there was room for these steps"
    slots.length[rows] = before + num_turns
    due: list[int] = (slots.commit_at[rows] - (num_turns - 1)).tolist()
    has_windows = kv.has_windows
    for slot, length, due_at in zip(rows.tolist(), before.tolist(), due, strict=True):
        active = by_slot[slot]
        assert active is not None
        tokens, owner = active.tokens, active.request.id
        if len(tokens) < length:
            slots.fill_up(active, length)
        tokens += [engine.token_of(owner)] * num_turns
        if length >= due_at:
            num_computed = length + num_turns - 1
            section.external.computed(active, num_computed)
            slots.commit_at[slot] = kv.commit(owner, tokens, num_computed)
            if has_windows and kv.has_left(owner):
                section.changes.changed(owner, slot)
