"""Which tokens each constrained sequence may get next: matchers and caps by slot, a step behind the device.

A mask needs the tokens of the step before. While a step's forward pass runs, the host waits for those, lets the
matchers go on, and fills the masks for its sampling. A cap alone has nothing to say until so many tokens have come
that its limit could be reached: until then nobody waits for its tokens, and its steps may be captured ones.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.compiling import Compiling
from headrace.engine.staging import Upload
from headrace.engine.thinking import Marked, Thinking
from headrace.sampling.grammar import GrammarCompiler, Masks, Matcher
from headrace.sampling.rows import to_device
from headrace.seam import Ints, SlotInit, token_bits

__all__ = ["Constraints", "is_allowed"]

MAX_LATE = 64
"""Tokens of a sequence that nobody needs yet and whose steps' results are kept for it."""
NUM_UNDER_WAY = 4
"""Steps whose results may not be there yet; older ones are."""
ALL = int(np.iinfo(np.int32).max)
WRONG_TOKEN = "the grammar does not go on with a token that it let pass"


class Held:
    """The grammar's share of one sequence: free until its reasoning has ended, then held to the matcher."""

    def __init__(self, init: SlotInit, matcher: Matcher, compiler: GrammarCompiler, *, num_words: int) -> None:
        assert init.grammar is not None
        stops = [token for token in init.stop_ids if token < num_words * 32]
        ends = [token for token in stops if token in compiler.silent_ids] or list(compiler.end_ids)
        self.matcher = matcher
        self.error = ""
        self._waits_for = Marked(init.grammar.starts_after) if init.grammar.starts_after else None
        self._has_ended = False
        self._ends = frozenset(ends)
        self._end_bits = token_bits(ends, num_words)
        self._stop_bits = token_bits(stops, num_words)

    @property
    def is_asked(self) -> bool:
        """Whether the matcher is asked what may come."""
        return self._waits_for is None and not self._has_ended and not self.error

    def push(self, token: int) -> None:
        """One more token of the output."""
        if self.error or self._has_ended:
            return
        if self._waits_for is not None:
            if self._waits_for.push(token):
                self._waits_for = None
        elif token in self._ends:
            self._has_ended = True
        elif not self.matcher.advance(token):
            self.error = WRONG_TOKEN

    def finish(self, row: Ints, *, may_stop: bool) -> None:
        """The ends' share of a mask [words], which has the matcher's tokens if `is_asked`."""
        if self._waits_for is not None:  # what ends now would leave nothing of what was asked for
            row[:] = ~self._end_bits if may_stop else ~(self._end_bits | self._stop_bits)
            return
        if self._has_ended:
            row[:] = self._end_bits
            return
        if not may_stop and (row & ~self._stop_bits).any():
            row &= ~self._stop_bits
        elif self.matcher.can_end:  # nothing else may be left before the least length
            if may_stop or not row.any():
                row |= self._end_bits


class Constraint:
    """One sequence: a grammar, a cap on its reasoning, or both."""

    def __init__(self, init: SlotInit, held: Held | None, thinking: Thinking | None) -> None:
        self.held = held
        self.thinking = thinking
        self._length = init.prompt_len
        self._min_len = init.min_len
        self._late: deque[tuple[Upload, int]] = deque()

    @property
    def error(self) -> str:
        return self.held.error if self.held is not None else ""

    @property
    def num_free(self) -> int:
        """Tokens that may come before this has anything to say; 0: it has to be asked now."""
        if self.held is not None:
            return 0
        assert self.thinking is not None
        return ALL if self.thinking.is_over else max(self.thinking.num_left - len(self._late), 0)

    def push(self, token: int) -> None:
        """One more token of the output."""
        self._length += 1
        if self.held is not None:
            self.held.push(token)
        if self.thinking is not None:
            self.thinking.push(token)

    def expect(self, upload: Upload, row: int) -> None:
        """The row's token of a step that has just been queued."""
        self._late.append((upload, row))
        if len(self._late) > MAX_LATE:
            self.catch_up(but=NUM_UNDER_WAY)

    def catch_up(self, *, but: int = 0) -> None:
        """Waits for the device; the last `but` tokens may stay unknown."""
        while len(self._late) > but:
            upload, row = self._late.popleft()
            token, was_done, bad = upload.wait()[:, row].tolist()
            if not was_done and not bad:
                self.push(token)

    def finish(self, row: Ints) -> None:
        """What is left of a mask [words], which has the matcher's tokens if there is one to ask."""
        if self.held is not None:
            self.held.finish(row, may_stop=self._length + 1 > self._min_len)
        forced = self.thinking.forced if self.thinking is not None else None
        if forced is None:
            return
        only = token_bits([forced], len(row))
        is_asked = self.held is not None and self.held.is_asked
        if is_asked and not (row & only).any():
            return  # in the middle of a character: the grammar lets it come behind it
        row[:] = only


class Constraints:
    """By slot. Calls come from the thread that runs steps."""

    def __init__(self, num_slots: int, *, num_ids: int, device: torch.device, compiling: Compiling) -> None:
        self.compiling = compiling
        self._num_words = -(-num_ids // 32)
        self._device = device
        self._by_slot: dict[int, Constraint] = {}
        self._errors: dict[int, str] = {}
        """Slots whose grammar could not begin."""
        self._num_free = np.full(num_slots, ALL, np.int32)
        """Tokens that a slot may get before its constraint must be asked; `ALL` without one."""

    def begin(self, init: SlotInit) -> None:
        """A slot begins or resumes; what is wrong with its grammar fails its rows only."""
        self.free(init.slot)
        if init.grammar is None and init.thinking is None:
            return
        try:
            held = self._held(init) if init.grammar is not None else None
        except Exception as error:
            assert init.grammar is not None
            self._errors[init.slot] = f"{init.grammar.param}: {error}"
            self._num_free[init.slot] = 0
            return
        constraint = Constraint(init, held, Thinking(init.thinking) if init.thinking is not None else None)
        assert init.history is not None, "a constrained slot is told all tokens so far"
        for token in init.history[init.prompt_len :].tolist():
            constraint.push(token)
        self._by_slot[init.slot] = constraint
        self._num_free[init.slot] = constraint.num_free

    def _held(self, init: SlotInit) -> Held:
        """Raises whatever a grammar's library does."""
        assert init.grammar is not None
        matcher = self.compiling.get(init.grammar).matcher()
        return Held(init, matcher, self.compiling.compiler, num_words=self._num_words)

    def free(self, slot: int) -> None:
        """Safe to call twice."""
        self._num_free[slot] = ALL
        self._by_slot.pop(slot, None)
        self._errors.pop(slot, None)

    def are_due(self, slots: NDArray[np.integer]) -> bool:
        """Whether `masks` of these slots may have something to say."""
        return bool((self._num_free[slots] == 0).any())

    def masks(self, slots: NDArray[np.integer]) -> tuple[Masks | None, dict[int, str]]:
        """What the rows of a step may get, and by row what went wrong. Waits for the step before.

        Args:
            slots: of the rows that sample, in their order.
        """
        rows = np.flatnonzero(self._num_free[slots] == 0)
        if not len(rows):
            return None, {}
        bits = np.full((len(rows), self._num_words), -1, np.int32)
        errors: dict[int, str] = {}
        places = {at: self._by_slot[slot] for at, slot in enumerate(slots[rows].tolist()) if slot in self._by_slot}
        for constraint in places.values():
            constraint.catch_up()
        matchers = {
            at: each.held.matcher for at, each in places.items() if each.held is not None and each.held.is_asked
        }
        found = self._fill(matchers, bits)
        for at, slot in enumerate(slots[rows].tolist()):
            constraint = places.get(at)
            error = self._errors[slot] if constraint is None else constraint.error or found.get(at, "")
            if error:
                errors[int(rows[at])] = error
                bits[at] = -1
            else:
                assert constraint is not None
                constraint.finish(bits[at])
                self._num_free[slot] = constraint.num_free
        return Masks(to_device(rows, self._device), to_device(bits, self._device)), errors

    def _fill(self, matchers: dict[int, Matcher], bits: Ints) -> dict[int, str]:
        """-> by row of `bits`, what went wrong"""
        if not matchers:
            return {}
        held = list(matchers)
        own = bits if len(held) == len(bits) else np.empty((len(held), self._num_words), np.int32)
        errors = self.compiling.compiler.fill(list(matchers.values()), own)
        if own is not bits:
            bits[held] = own
        return {held[index]: error for index, error in errors.items()}

    def expect(self, slots: NDArray[np.integer], upload: Upload) -> None:
        """A step has been queued: `upload` will hold the tokens of its rows."""
        for row in np.flatnonzero(self._num_free[slots] != ALL).tolist():
            slot = int(slots[row])
            constraint = self._by_slot.get(slot)
            if constraint is not None:
                constraint.expect(upload, row)
                self._num_free[slot] = constraint.num_free


def is_allowed(masks: Masks, tokens: Tensor) -> Tensor:
    """Whether the masked rows' tokens are what their masks let pass. tokens: [rows of the call] -> bool [n]"""
    chosen = tokens.index_select(0, masks.rows)
    word = (chosen // 32).clamp(max=masks.bits.shape[1] - 1)
    packed = masks.bits.gather(1, word[:, None]).squeeze(1)
    return ((packed >> (chosen % 32).int()) & 1).bool() & (chosen < masks.bits.shape[1] * 32)
