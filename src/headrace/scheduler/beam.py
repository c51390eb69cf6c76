"""Beam search in the control half: beams are slots, a step's rows carry host-chosen tokens.

After each commit the top candidates of every live beam are compared; a beam that is continued twice
forks (its child shares full blocks and gets a copy of the partial one), a beam that is not continued
gives its slot to such a child. Selection follows the usual rule (Hugging Face `generate`): of the
2 * width best continuations, those that end count only within the first `width`, the best `width`
others live on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.scheduler.request import Active
from headrace.seam import RowLogprobs, SlotInit
from headrace.types import Beam, BeamSearch, Logprobs, Sampling

if TYPE_CHECKING:
    from headrace.scheduler.section import SectionScheduler

UNLIMITED = 2**31 - 1


@dataclass(slots=True)
class Hypothesis:
    """A live beam: its output so far and the slot and table that hold its KV."""

    slot: int
    owner: int
    tokens: list[int]
    cumulative: float
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])


@dataclass(frozen=True, slots=True)
class Candidate:
    parent: int
    token: int
    cumulative: float
    entry: Logprobs


@dataclass(slots=True)
class BeamRows:
    """The rows of one beam search in one plan: one known token each."""

    beams: Beams
    slots: list[int]
    ids: list[int]
    starts: list[int]


def num_candidates(search: BeamSearch, num_stops: int) -> int:
    """Log-probabilities wanted per beam: enough that `2 * width` remain whatever ends."""
    return 2 * search.width + num_stops


def beam_init(active: Active, slot: int) -> SlotInit:
    """Beams stop and choose on the host, so the device slot never ends and only reports."""
    request = active.request
    assert request.beam is not None
    sampling = Sampling(
        logprobs=num_candidates(request.beam, len(request.stop_ids)),
        processed_logprobs=True,
        seed=request.sampling.seed,
        logit_bias=request.sampling.logit_bias,
    )
    return SlotInit(slot, request.id, sampling, len(request.prompt), 0, UNLIMITED, ())


def score(cumulative: float, length: int, penalty: float) -> float:
    return cumulative / (length**penalty) if penalty else cumulative


def expand(live: Sequence[Hypothesis], rows: Sequence[RowLogprobs], diversity_rate: float) -> list[Candidate]:
    """All continuations on offer, best first; ties go to the lower beam, then the likelier token.

    Args:
        rows: per beam one position: the chosen token first (ignored), then the top K.
        diversity_rate: adds rate * rank within the beam to the sorting key.
    """
    candidates: list[tuple[float, int, int, Candidate]] = []
    for parent, (beam, row) in enumerate(zip(live, rows, strict=True)):
        ids, values = row.ids[0, 1:].tolist(), row.values[0, 1:].tolist()
        for rank, (token, value) in enumerate(zip(ids, values, strict=True)):
            cumulative = beam.cumulative + value
            entry = Logprobs([token], [value], [rank + 1])
            key = -(cumulative + diversity_rate * rank)
            candidates.append((key, parent, rank, Candidate(parent, token, cumulative, entry)))
    candidates.sort(key=lambda item: item[:3])
    return [candidate for *_, candidate in candidates]


class Beams:
    """One beam search. `active` is its face to the scheduler: the slot admitted, the terminal state."""

    def __init__(self, active: Active, section: SectionScheduler) -> None:
        assert active.request.beam is not None
        self.active = active
        self.search = active.request.beam
        self.stop_ids = frozenset(active.request.stop_ids)
        self.finished: list[Beam] = []
        self.live: list[Hypothesis] = []
        self._section = section
        self._waiting = True  # for the prompt's last chunk, later for rows in flight
        first = Hypothesis(active.slot, active.request.id, [], 0.0)
        self._spare = [first] + [
            Hypothesis(slot, owner, [], 0.0) for slot, owner in section.take_beam_slots(active, self.search.width - 1)
        ]

    @property
    def prompt_len(self) -> int:
        return len(self.active.request.prompt)

    def promised_blocks(self) -> int:
        """What all beams may still take at worst: each the rest of its length, and a copy at a fork."""
        kv = self._section.kv
        owner = self.live[0].owner if self.live else self.active.request.id
        return (kv.blocks_needed(self.active.limit) - len(kv.table(owner)) + 1) * self.search.width

    def slots(self) -> list[int]:
        return [beam.slot for beam in (*self.live, *self._spare)]

    @property
    def num_rows_wanted(self) -> int:
        return 0 if self._waiting or self.active.draining else len(self.live)

    def plan(self) -> BeamRows | None:
        """One row a live beam, once the last commit has chosen their tokens."""
        if not self.num_rows_wanted:
            return None
        self._waiting = True
        self._section.slots.rows_in_flight[self.active.slot] += 1
        rows = BeamRows(self, [], [], [])
        for beam in self.live:
            length = self.prompt_len + len(beam.tokens)
            extended = self._section.kv.extend(beam.owner, length)
            assert extended, "the blocks of a beam were promised at admission"
            self._section.changes.changed(beam.owner, beam.slot)
            rows.slots.append(beam.slot)
            rows.ids.append(beam.tokens[-1])
            rows.starts.append(length - 1)
        return rows

    def commit(self, rows: Sequence[RowLogprobs]) -> None:
        """Choose among the continuations; ends the search by filling `active.finish`."""
        self._waiting = False
        if not self.live:  # the prompt's last chunk: one beam that becomes `width`
            self.live = [self._spare.pop(0)]
        num_output = len(self.live[0].tokens) + 1
        chosen = self._select(expand(self.live, rows, self.search.diversity_rate), num_output)
        self._continue(chosen)
        if self.prompt_len + num_output >= self.active.limit:
            self._finish_live()
        elif not self.live or self._is_done(num_output):
            self.active.finish = "stop"

    def _select(self, candidates: list[Candidate], num_output: int) -> list[Candidate]:
        width = self.search.width
        may_stop = num_output > self.active.request.min_tokens
        chosen: list[Candidate] = []
        for rank, candidate in enumerate(candidates):
            if candidate.token in self.stop_ids:
                if may_stop and rank < width:
                    parent = self.live[candidate.parent]
                    self._keep(
                        Beam(
                            tokens=[*parent.tokens, candidate.token],
                            score=score(candidate.cumulative, num_output, self.search.length_penalty),
                            cumulative_logprob=candidate.cumulative,
                            finish="stop",
                            stop_token=candidate.token,
                            logprobs=[*parent.logprobs, candidate.entry],
                        )
                    )
                continue
            chosen.append(candidate)
            if len(chosen) == width:
                break
        return chosen

    def _keep(self, beam: Beam) -> None:
        self.finished.append(beam)
        self.finished.sort(key=lambda kept: -kept.score)
        del self.finished[self.search.width :]

    def _continue(self, chosen: list[Candidate]) -> None:
        """Give every chosen continuation a slot and a table, forking where a parent has several."""
        section = self._section
        children: dict[int, list[Candidate]] = {}
        for candidate in chosen:
            children.setdefault(candidate.parent, []).append(candidate)
        for index, beam in enumerate(self.live):
            if index not in children:
                section.drop_beam(beam.owner)
                self._spare.append(beam)
        grown: list[Hypothesis] = []
        for index, candidates in sorted(children.items()):
            parent = self.live[index]
            num_computed = self.prompt_len + len(parent.tokens)
            for candidate in candidates[1:]:
                home = self._spare.pop(0)
                section.fork(parent.owner, home.owner, home.slot, num_computed)
                grown.append(self._child(parent, candidate, home))
            grown.append(self._child(parent, candidates[0], parent))
        self.live = sorted(grown, key=lambda beam: -beam.cumulative)

    @staticmethod
    def _child(parent: Hypothesis, candidate: Candidate, home: Hypothesis) -> Hypothesis:
        return Hypothesis(
            home.slot,
            home.owner,
            [*parent.tokens, candidate.token],
            candidate.cumulative,
            [*parent.logprobs, candidate.entry],
        )

    def _is_done(self, num_output: int) -> bool:
        if len(self.finished) < self.search.width or not self.live:
            return False
        if self.search.early_stopping == 1:
            return True
        penalty = self.search.length_penalty
        reach = num_output
        if self.search.early_stopping == 2 and penalty > 0:
            reach = self.active.limit - self.prompt_len
        return score(self.live[0].cumulative, reach, penalty) <= self.finished[-1].score

    def _finish_live(self) -> None:
        for beam in self.live:
            self._keep(
                Beam(
                    tokens=beam.tokens,
                    score=score(beam.cumulative, len(beam.tokens), self.search.length_penalty),
                    cumulative_logprob=beam.cumulative,
                    finish="length",
                    logprobs=beam.logprobs,
                )
            )
        self.active.finish = "length"

    def result(self) -> list[Beam]:
        return self.finished[: self.search.num_return]

    def release(self) -> None:
        """Give every table back; the slots are the section's to free."""
        owners = [beam.owner for beam in self.live] or [self.active.request.id]
        for owner in owners:
            self._section.drop_beam(owner)
