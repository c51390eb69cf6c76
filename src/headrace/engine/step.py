"""One step's rows: queue all of the device's work, then hand out what will become the result.

Nothing here waits for the device. The next step is queued while this one runs; whoever wants the result waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.batch import Batch, Wanted, batch_of, build_batch, generation_rows
from headrace.engine.graphs import NO_GRAPHS, DecodeGraphs
from headrace.engine.runner import Runner
from headrace.engine.slots import SlotState
from headrace.engine.staging import Upload, stage
from headrace.sampling.logprobs import prompt_logprobs
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling.state import RAW_LOGITS
from headrace.seam import HOST_TOKEN, GroupSpec, RowLogprobs, Section, SectionResult, SlotInit, ints

NO_NUMBERS = "the model computed no numbers (NaN): its weights are damaged, or float16 is too small; try dtype bfloat16"

Outcome = Callable[[], SectionResult]
"""Waits for the device."""


class Stepper:
    """Runs the rows of sections over one rank's slots, caches and sampler."""

    def __init__(
        self,
        runner: Runner,
        state: SlotState,
        sampler: Sampler,
        *,
        groups: Sequence[GroupSpec],
        block_size: int,
        max_len: int,
        capture_sizes: Sequence[int] = (),
    ) -> None:
        """
        Args:
            max_len: the longest sequence; captured steps are planned for it.
            capture_sizes: numbers of generation rows whose step becomes a CUDA graph when it first comes.
        """
        self.runner = runner
        self.state = state
        self.sampler = sampler
        self.inits: dict[int, SlotInit] = {}
        """By slot: what began there."""
        self._groups = groups
        self._block_size = block_size
        self._max_len = max_len
        self._captured_width = sampler.state.width
        self.graphs = DecodeGraphs(self._decode, capture_sizes, state) if capture_sizes else NO_GRAPHS

    @torch.inference_mode()
    def queue(self, section: Section) -> Outcome:
        if self.graphs.fits(section.num_rows) and self._is_plain(section):
            return self._queue_graph(section)
        batch, wanted = build_batch(section, self.state, groups=self._groups, block_size=self._block_size)
        hidden = self.runner.forward(batch.ids, batch.groups, rows=wanted.tokens)
        return self._sample(section, batch, wanted, hidden)

    def _is_plain(self, section: Section) -> bool:
        """Generation rows only, whose tokens are the most likely ones and nothing else is asked of."""
        if section.num_context_rows or (section.flags & HOST_TOKEN).any():
            return False
        return not self.sampler.state.features[section.slot].any()

    def _queue_graph(self, section: Section) -> Outcome:
        self.state.raise_bounds(section)
        self.sampler.upload()
        if self.sampler.state.width != self._captured_width:  # the captured parameters are no longer the ones in use
            self.graphs.drop()
            self._captured_width = self.sampler.state.width
        upload = self.graphs.run(section.slot)
        num_rows = section.num_rows

        def result() -> SectionResult:
            tokens, was_done, bad = upload.wait()[:, :num_rows]
            return _result(section, np.arange(num_rows), tokens, was_done != 0, bad != 0, {})

        return result

    def _decode(self, slots: Tensor) -> Tensor:
        """A step of generation rows, all on the device. -> int64 [3, rows]: token, was done, no numbers"""
        rows = generation_rows(slots, max_kv=self._max_len)
        batch = batch_of(rows, self.state, groups=self._groups, block_size=self._block_size)
        hidden = self.runner.forward(batch.ids, batch.groups)
        self.state.num_tokens.index_copy_(0, slots, batch.kv_lens)
        logits = self.runner.logits(hidden)
        host_slots = np.full(len(slots), self.state.dummy)
        sampled = self.sampler.sample(logits.contiguous(), slots, batch.kv_lens, host_slots=host_slots)
        return self._accept(slots, logits, sampled, batch.was_done)

    def _accept(self, slots: Tensor, logits: Tensor, sampled: Sampled, was_done: Tensor) -> Tensor:
        """Logits with a NaN have it as their maximum, so it is seen in the chosen one."""
        bad = logits.gather(1, sampled.tokens[:, None]).squeeze(1).isnan()
        self.state.accept(slots, sampled.tokens, sampled.done | was_done | bad)
        return torch.stack((sampled.tokens, was_done.long(), bad.long()))

    def _sample(self, section: Section, batch: Batch, wanted: Wanted, hidden: Tensor) -> Outcome:
        """Sampling and slot state."""
        self.state.num_tokens.index_copy_(0, batch.slots, batch.kv_lens)
        prompt = {int(row): self._prompt_logprobs(section, wanted, hidden, int(row)) for row in wanted.prompt_rows}
        rows = wanted.sample_rows
        if not len(rows):
            accepted = ints(np.zeros(section.num_rows))
            return lambda: SectionResult(accepted, ints(), prompt_logprobs=prompt)
        slots, was_done = batch.slots[wanted.rows], batch.was_done[wanted.rows]
        logits = self.runner.logits(hidden[wanted.last])
        kept = self._kept_logits(section, rows, logits)
        host_slots = section.slot[rows]
        sampled = self.sampler.sample(
            logits.contiguous(), slots, batch.kv_lens[wanted.rows], section.flags[rows], host_slots=host_slots
        )
        upload = Upload(self._accept(slots, logits, sampled, was_done))
        self.state.fail([int(host_slots[row]) for row in sampled.errors])

        def result() -> SectionResult:
            tokens, done, bad = upload.wait()
            found = _result(section, rows, tokens, done != 0, bad != 0, sampled.errors)
            logprobs = {
                int(rows[row]): values for row, values in sampled.logprobs.items() if found.num_accepted[rows[row]]
            }
            return SectionResult(found.num_accepted, found.tokens, logprobs, prompt, kept, found.errors)

        return result

    def _kept_logits(self, section: Section, rows: NDArray[np.int64], logits: Tensor) -> dict[int, Tensor]:
        """The raw logits that offline callers asked for; sampling overwrites them."""
        wanted = np.flatnonzero(self.sampler.state.features[section.slot[rows]] & RAW_LOGITS).tolist()
        return {int(rows[at]): logits[at : at + 1].to(torch.float32, copy=True) for at in wanted}

    def _prompt_logprobs(self, section: Section, wanted: Wanted, hidden: Tensor, row: int) -> RowLogprobs:
        """Of the prompt tokens that follow this chunk's positions."""
        first, end = wanted.query_starts[row], wanted.query_starts[row + 1]
        ids = section.ids[first:end]
        targets = np.append(ids[1:], section.next_ids[row])
        count = len(targets) if targets[-1] >= 0 else len(targets) - 1
        base = int(wanted.at[row]) - (len(ids) - 1)
        k = self.inits[int(section.slot[row])].sampling.prompt_logprobs
        return prompt_logprobs(
            lambda part: self.runner.logits(hidden[base + part.start : base + part.stop]).float(),
            stage([targets[:count]], self.state.device)[0],
            k,
            vocab_size=self.sampler.vocab_size,
            num_valid_ids=self.sampler.num_valid_ids,
        )


def _result(
    section: Section,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    was_done: NDArray[np.bool_],
    bad: NDArray[np.bool_],
    errors: dict[int, str],
) -> SectionResult:
    """Args: rows: those that sample; the rest is by such row."""
    errors = dict.fromkeys(np.flatnonzero(bad & ~was_done).tolist(), NO_NUMBERS) | errors
    live = ~was_done
    live[list(errors)] = False
    accepted = np.zeros(section.num_rows, np.int32)
    accepted[rows[live]] = 1
    by_row = {int(rows[row]): message for row, message in errors.items()}
    return SectionResult(accepted, tokens[live].astype(np.int32), errors=by_row)
