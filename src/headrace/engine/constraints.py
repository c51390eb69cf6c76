"""Which tokens each constrained sequence may get next: matchers by slot, a step behind the device.

A mask needs the tokens of the step before. While a step's forward pass runs, the host waits for those, lets the
matchers go on, and fills the masks for its sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.compiling import Compiling
from headrace.engine.staging import Upload
from headrace.sampling.grammar import GrammarCompiler, Masks, Matcher
from headrace.sampling.rows import to_device
from headrace.seam import Ints, SlotInit, token_bits

__all__ = ["NO_TOKEN", "Constraints", "is_allowed"]

NO_TOKEN = "no token is left to choose: the grammar, the bad words and the biases of the request rule out all"
WRONG_TOKEN = "the grammar does not go on with a token that it let pass"


class Constraint:
    """One sequence: free until its reasoning has ended, then held to its grammar."""

    def __init__(self, init: SlotInit, matcher: Matcher, compiler: GrammarCompiler, *, num_words: int) -> None:
        assert init.grammar is not None
        stops = [token for token in init.stop_ids if token < num_words * 32]
        ends = [token for token in stops if token in compiler.silent_ids] or list(compiler.end_ids)
        self.matcher = matcher
        self.error = ""
        self.length = init.prompt_len
        self._min_len = init.min_len
        self._waits_for = init.grammar.starts_after
        self._tail: list[int] = []
        self._has_ended = False
        self._ends = frozenset(ends)
        self._end_bits = token_bits(ends, num_words)
        self._stop_bits = token_bits(stops, num_words)
        self._late: list[tuple[Upload, int]] = []

    @property
    def is_held(self) -> bool:
        """Whether the matcher is asked what may come."""
        return not self._waits_for and not self._has_ended and not self.error

    def push(self, token: int) -> None:
        """One more token of the output."""
        self.length += 1
        if self.error or self._has_ended:
            return
        if self._waits_for:
            self._tail = [*self._tail, token][-len(self._waits_for) :]
            if tuple(self._tail) == self._waits_for:
                self._waits_for = ()
        elif token in self._ends:
            self._has_ended = True
        elif not self.matcher.advance(token):
            self.error = WRONG_TOKEN

    def expect(self, upload: Upload, row: int) -> None:
        """The row's token of a step that has just been queued."""
        self._late.append((upload, row))

    def catch_up(self) -> None:
        """Waits for the device."""
        for upload, row in self._late:
            token, was_done, bad = upload.wait()[:, row].tolist()
            if not was_done and not bad:
                self.push(token)
        self._late.clear()

    def finish(self, row: Ints) -> None:
        """The ends' share of a mask [words], which has the matcher's tokens if `is_held`."""
        may_stop = self.length + 1 > self._min_len
        if self._waits_for:  # what ends now would leave nothing of what was asked for
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


class Constraints:
    """By slot. Calls come from the thread that runs steps."""

    def __init__(self, num_slots: int, *, num_ids: int, device: torch.device, compiling: Compiling) -> None:
        self.compiling = compiling
        self._num_words = -(-num_ids // 32)
        self._device = device
        self._by_slot: dict[int, Constraint] = {}
        self._errors: dict[int, str] = {}
        """Slots whose grammar could not begin."""
        self._is_constrained = np.zeros(num_slots, np.bool_)

    def begin(self, init: SlotInit) -> None:
        """A slot begins or resumes; what is wrong with its grammar fails its rows only."""
        self.free(init.slot)
        if init.grammar is None:
            return
        self._is_constrained[init.slot] = True
        try:
            matcher = self.compiling.get(init.grammar).matcher()
            constraint = Constraint(init, matcher, self.compiling.compiler, num_words=self._num_words)
        except Exception as error:
            self._errors[init.slot] = f"{init.grammar.param}: {error}"
            return
        assert init.history is not None, "a constrained slot is told all tokens so far"
        for token in init.history[init.prompt_len :].tolist():
            constraint.push(token)
        self._by_slot[init.slot] = constraint

    def free(self, slot: int) -> None:
        """Safe to call twice."""
        self._is_constrained[slot] = False
        self._by_slot.pop(slot, None)
        self._errors.pop(slot, None)

    def masks(self, slots: NDArray[np.integer]) -> tuple[Masks | None, dict[int, str]]:
        """What the rows of a step may get, and by row what went wrong. Waits for the step before.

        Args:
            slots: of the rows that sample, in their order.
        """
        rows = np.flatnonzero(self._is_constrained[slots])
        if not len(rows):
            return None, {}
        bits = np.full((len(rows), self._num_words), -1, np.int32)
        errors: dict[int, str] = {}
        held: list[int] = []
        places = {at: self._by_slot[slot] for at, slot in enumerate(slots[rows].tolist()) if slot in self._by_slot}
        for constraint in places.values():
            constraint.catch_up()
        held = [at for at, constraint in places.items() if constraint.is_held]
        found = self._fill(held, places, bits)
        for at, slot in enumerate(slots[rows].tolist()):
            constraint = places.get(at)
            error = self._errors[slot] if constraint is None else constraint.error or found.get(at, "")
            if error:
                errors[int(rows[at])] = error
                bits[at] = -1
            else:
                assert constraint is not None
                constraint.finish(bits[at])
        return Masks(to_device(rows, self._device), to_device(bits, self._device)), errors

    def _fill(self, held: Sequence[int], places: dict[int, Constraint], bits: Ints) -> dict[int, str]:
        """-> by row of `bits`, what went wrong"""
        if not held:
            return {}
        own = bits if len(held) == len(bits) else np.empty((len(held), self._num_words), np.int32)
        errors = self.compiling.compiler.fill([places[at].matcher for at in held], own)
        if own is not bits:
            bits[held] = own
        return {held[index]: error for index, error in errors.items()}

    def expect(self, slots: NDArray[np.integer], upload: Upload) -> None:
        """A step has been queued: `upload` will hold the tokens of its rows."""
        for row in np.flatnonzero(self._is_constrained[slots]).tolist():
            constraint = self._by_slot.get(int(slots[row]))
            if constraint is not None:
                constraint.expect(upload, row)


def is_allowed(masks: Masks, tokens: Tensor) -> Tensor:
    """Whether the masked rows' tokens are what their masks let pass. tokens: [rows of the call] -> bool [n]"""
    chosen = tokens.index_select(0, masks.rows)
    word = (chosen // 32).clamp(max=masks.bits.shape[1] - 1)
    packed = masks.bits.gather(1, word[:, None]).squeeze(1)
    return ((packed >> (chosen % 32).int()) & 1).bool() & (chosen < masks.bits.shape[1] * 32)
