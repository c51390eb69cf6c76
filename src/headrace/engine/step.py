"""One step's rows: queue all of the device's work, then hand out what will become the result.

Nothing here waits for the device. The next step is queued while this one runs; whoever wants the result waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.batch import Batch, Rows, Wanted, batch_of, build_batch, generation_batch
from headrace.engine.constraints import Constraints, is_allowed
from headrace.engine.forward_graphs import ForwardGraphs
from headrace.engine.graphs import Captured, DecodeGraphs, GraphPool
from headrace.engine.pooling import Pooled
from headrace.engine.runner import Runner
from headrace.engine.slots import SlotState
from headrace.engine.staging import Upload, stage
from headrace.kernels.accept_tokens import accept_tokens
from headrace.sampling.grammar import Masks
from headrace.sampling.logprobs import HostLogprobs, prompt_logprobs
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling.state import ALTERED, CAPTURABLE, LOGPROBS, RANDOM, RAW_LOGITS
from headrace.seam import NO_TOKEN, SAMPLE, GroupSpec, RowLogprobs, Section, SectionResult, SlotInit, ints

NO_NUMBERS = "the model computed no numbers (NaN): its weights are damaged, or float16 is too small; try dtype bfloat16"

NOT_A_NUMBER, NOT_ALLOWED = 1, 2
"""What is wrong with a row's token."""

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
        constraints: Constraints,
        groups: Sequence[GroupSpec],
        block_size: int,
        max_len: int,
        capture_sizes: Sequence[int] = (),
        token_sizes: Sequence[int] = (),
    ) -> None:
        """
        Args:
            max_len: the longest sequence; captured steps are planned for it.
            capture_sizes: numbers of generation rows whose step becomes a CUDA graph when it first comes; none for
                no graphs at all.
            token_sizes: numbers of prompt tokens that steps with prompts are padded to, to become graphs too.
        """
        self.runner = runner
        self.state = state
        self.sampler = sampler
        self.constraints = constraints
        self.inits: dict[int, SlotInit] = {}
        """By slot: what began there."""
        self._groups = groups
        self._block_size = block_size
        self._max_len = max_len
        self._captured_places = sampler.state.places
        self._starts: dict[int, Tensor] = {}
        self._max_captured = max(capture_sizes, default=0)
        self._kept: Tensor | None = None
        self.graphs: DecodeGraphs | None = None
        self.forwards: ForwardGraphs | None = None
        if capture_sizes:
            pool = GraphPool(state.device)
            self.graphs = DecodeGraphs(self._decode, capture_sizes, state, pool)
            self.forwards = ForwardGraphs(
                self._forward,
                state,
                pool,
                token_sizes=token_sizes,
                max_len=max_len,
                wants_lengths=runner.wants_lengths,
            )
        self.num_eager = 0
        """Steps of generation rows alone that ran without a graph although there are graphs."""

    @torch.inference_mode()
    def capture_all(self) -> None:
        """The steps that a server begins with, instead of when they first come."""
        if self.graphs is not None and self.forwards is not None:
            self.graphs.capture_all()
            self.forwards.capture_all()

    def drop_graphs(self) -> None:
        """Give their memory back, or tensors that they read have moved: they are captured again when needed."""
        if self.graphs is not None and self.forwards is not None:
            self.graphs.drop()
            self.forwards.drop()

    @torch.inference_mode()
    def queue(self, section: Section) -> Outcome:
        if self.graphs is not None and self.graphs.fits(section.num_rows) and self._is_plain(section):
            return self._queue_graph(self.graphs, section)
        captured = None if self.forwards is None else self.forwards.run(section)
        if captured is not None:
            self.state.raise_bounds(section)
            return self._sample(section, *captured)
        self.num_eager += self.graphs is not None and not section.num_context_rows
        batch, wanted = build_batch(section, self.state, groups=self._groups, block_size=self._block_size)
        hidden = self.runner.forward(batch.ids, batch.groups, rows=wanted.tokens)
        if not Pooled.is_wanted(section):
            return self._sample(section, batch, wanted, hidden)
        pooled = Pooled(section, wanted, hidden)
        sampled = self._sample(section, batch, wanted, hidden)
        return lambda: pooled.add_to(sampled())

    def _is_plain(self, section: Section) -> bool:
        """Generation rows only, none of which needs the host before its token is there."""
        if section.num_context_rows or (section.flags & ~SAMPLE).any():
            return False
        if (self.sampler.state.features[section.slot] & ~CAPTURABLE).any():
            return False
        return not self.constraints.are_due(section.slot)

    def _queue_graph(self, graphs: DecodeGraphs, section: Section) -> Outcome:
        self.state.raise_bounds(section)
        self.sampler.upload()
        places = self.sampler.state.places
        if places != self._captured_places:  # the captured parameters are no longer the ones in use
            graphs.drop()
            self._captured_places = places
        features = self.sampler.state.features[section.slot]
        captured = graphs.run(section.slot, is_shaped=bool((features & (RANDOM | ALTERED | LOGPROBS)).any()))
        num_rows = section.num_rows
        upload = Upload(captured.outputs)
        self.constraints.expect(section.slot, upload)
        sampled = None
        if (features & LOGPROBS).any():
            assert captured.logits is not None
            tokens = captured.outputs[0, :num_rows]
            sampled = self.sampler.report(captured.logits[:num_rows], tokens, host_slots=section.slot)

        def result() -> SectionResult:
            tokens, was_done, bad = upload.wait()[:, :num_rows]
            found = _result(section, np.arange(num_rows), tokens, was_done != 0, bad, {})
            if sampled is None:
                return found
            logprobs = {row: values for row, values in sampled.logprobs.items() if found.num_accepted[row]}
            return replace(found, logprobs=logprobs)

        return result

    def _forward(self, rows: Rows, tokens: Tensor) -> tuple[Batch, Tensor]:
        """The pass of a step that samples outside, all on the device. -> (batch, hidden states of these tokens)"""
        batch = batch_of(rows, self.state, groups=self._groups, block_size=self._block_size)
        return batch, self.runner.forward(batch.ids, batch.groups, rows=tokens)

    def _decode(self, slots: Tensor, is_shaped: bool) -> Captured:
        """A step of generation rows, all on the device."""
        count = len(slots)
        if count not in self._starts:  # kept: a graph reads it
            self._starts[count] = torch.arange(count + 1, dtype=torch.int32, device=slots.device)
        batch = generation_batch(
            slots,
            self._starts[count],
            self.state,
            groups=self._groups,
            block_size=self._block_size,
            max_kv=self._max_len,
        )
        hidden = self.runner.forward(batch.ids, batch.groups)
        logits = self.runner.logits(hidden).contiguous()
        tokens = self.sampler.choose_captured(logits, slots, batch.kv_lens, is_shaped=is_shaped)
        state = self.state
        outputs = accept_tokens(
            tokens,
            logits,
            slots,
            batch.kv_lens,
            batch.was_done,
            self.sampler.state.table,
            last_token=state.last_token,
            num_tokens=state.num_tokens,
            done=state.done,
        )
        return Captured(outputs, self._keep(logits) if is_shaped else None)

    def _keep(self, logits: Tensor) -> Tensor:
        """In one buffer for all sizes of graphs: each would hold its own as long as the graph lives."""
        if self._kept is None:
            self._kept = logits.new_empty(self._max_captured, logits.shape[1])
        kept = self._kept[: len(logits)]
        return kept.copy_(logits)

    def _accept(
        self, slots: Tensor, logits: Tensor, sampled: Sampled, was_done: Tensor, masks: Masks | None = None
    ) -> Tensor:
        """Logits with a NaN have it as their maximum, so it is seen in the chosen one."""
        bad = logits.gather(1, sampled.tokens[:, None]).squeeze(1).isnan().long() * NOT_A_NUMBER
        if masks is not None:  # all may have been ruled out
            wrong = (~is_allowed(masks, sampled.tokens)).long() * NOT_ALLOWED
            bad = torch.maximum(bad, torch.zeros_like(bad).index_copy_(0, masks.rows, wrong))
        self.state.accept(slots, sampled.tokens, sampled.done | was_done | (bad != 0))
        return torch.stack((sampled.tokens, was_done.long(), bad))

    def _sample(self, section: Section, batch: Batch, wanted: Wanted, hidden: Tensor) -> Outcome:
        """Sampling and slot state, which changes last: a step that runs out of memory is queued again."""
        prompt = {int(row): self._prompt_logprobs(section, wanted, hidden, int(row)) for row in wanted.prompt_rows}
        rows = wanted.sample_rows
        if not len(rows):
            self.state.num_tokens.index_copy_(0, batch.slots, batch.kv_lens)
            accepted = ints(np.zeros(section.num_rows))
            return lambda: SectionResult(accepted, ints(), prompt_logprobs=_waited(prompt))
        slots, was_done = batch.slots[wanted.rows], batch.was_done[wanted.rows]
        logits = self.runner.logits(hidden[wanted.last])
        kept = self._kept_logits(section, rows, logits)
        host_slots = section.slot[rows]
        masks, errors = self.constraints.masks(host_slots)
        sampled = self.sampler.sample(
            logits.contiguous(),
            slots,
            batch.kv_lens[wanted.rows],
            section.flags[rows],
            host_slots=host_slots,
            masks=masks,
        )
        self.state.num_tokens.index_copy_(0, batch.slots, batch.kv_lens)
        upload = Upload(self._accept(slots, logits, sampled, was_done, masks))
        errors |= sampled.errors
        self.state.fail([int(host_slots[row]) for row in errors])
        self.constraints.expect(host_slots, upload)

        def result() -> SectionResult:
            tokens, done, bad = upload.wait()
            found = _result(section, rows, tokens, done != 0, bad, errors)
            logprobs = {
                int(rows[row]): values for row, values in sampled.logprobs.items() if found.num_accepted[rows[row]]
            }
            return SectionResult(found.num_accepted, found.tokens, logprobs, _waited(prompt), kept, found.errors)

        return result

    def _kept_logits(self, section: Section, rows: NDArray[np.int64], logits: Tensor) -> dict[int, Tensor]:
        """The raw logits that offline callers asked for; sampling overwrites them."""
        wanted = np.flatnonzero(self.sampler.state.features[section.slot[rows]] & RAW_LOGITS).tolist()
        return {int(rows[at]): logits[at : at + 1].to(torch.float32, copy=True) for at in wanted}

    def _prompt_logprobs(self, section: Section, wanted: Wanted, hidden: Tensor, row: int) -> HostLogprobs:
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


def _waited(found: dict[int, HostLogprobs]) -> dict[int, RowLogprobs]:
    return {row: values.wait() for row, values in found.items()}


def _result(
    section: Section,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    was_done: NDArray[np.bool_],
    bad: NDArray[np.int64],
    errors: dict[int, str],
) -> SectionResult:
    """Args: rows: those that sample; the rest is by such row."""
    wrong = np.flatnonzero((bad != 0) & ~was_done).tolist()
    errors = {row: NO_TOKEN if bad[row] == NOT_ALLOWED else NO_NUMBERS for row in wrong} | errors
    live = ~was_done
    live[list(errors)] = False
    accepted = np.zeros(section.num_rows, np.int32)
    accepted[rows[live]] = 1
    by_row = {int(rows[row]): message for row, message in errors.items()}
    return SectionResult(accepted, tokens[live].astype(np.int32), errors=by_row)
