"""The sampler of one rank: from a step's logits to its tokens, vectorised over rows with parameters by slot.

Order, for a row that has everything: ids past the tokenizer's are masked; raw log-probabilities; bias, bad words,
repeated n-grams; penalties; stop ids before `min_len`; the caller's processors; the grammar; then argmax, or
temperature, min_p, top_k, top_p and the draw. Every stage touches the rows that need it only, and a batch of plain
greedy rows is one argmax.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.draw_rows import draw_rows
from headrace.kernels.mask_logits import mask_logits
from headrace.kernels.row_argmax import row_argmax
from headrace.kernels.shape_logits import shape_logits
from headrace.sampling.draw import ways
from headrace.sampling.filters import filtered
from headrace.sampling.grammar import Masks
from headrace.sampling.history import LateTokens
from headrace.sampling.logprobs import measure_in_chunks
from headrace.sampling.noise import Purpose, uniform
from headrace.sampling.penalties import mask_stop_ids, penalised
from headrace.sampling.rows import RowGroup, to_device
from headrace.sampling.sampled import Raw, Report, Sampled, StepRows
from headrace.sampling.state import (
    ALTERED,
    LATE,
    LOGPROBS,
    PENALTIES,
    PROCESSED,
    RANDOM,
    RANKED,
    SPECIAL,
    STOP_MASK,
    SlotParams,
)
from headrace.seam import HOST_TOKEN, Ints, SlotInit

HostSlots = NDArray[np.integer]
"""The slots of a call's rows [rows], as the plan has them on the host."""


class Sampler:
    """Chooses tokens for slots and keeps what their rules remember.

    `sample` = `choose`, then `commit` of every row whose token the device decides. Speculation calls them apart:
    `choose` at each drafted position with the drafts before it as `pending`, `verify`, `commit` of what stands.
    Calls come from one thread and, on a GPU, from one stream.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        num_valid_ids: int,
        device: torch.device | str,
        by_kernels: bool | None = None,
    ) -> None:
        """Args: by_kernels: rules and draws by the kernels that need nothing from the host; None: on a GPU."""
        assert 0 < num_valid_ids <= vocab_size
        self.vocab_size = vocab_size
        self.num_valid_ids = num_valid_ids
        self.device = torch.device(device)
        self._by_kernels = self.device.type == "cuda" if by_kernels is None else by_kernels
        self.state = SlotParams(num_slots, vocab_size, device=self.device)

    def begin(self, init: SlotInit) -> None:
        """A slot begins or resumes. What is wrong with its parameters fails its rows, not this call."""
        self.state.begin(init)

    def upload(self) -> None:
        """Bring what `begin` changed to the device now, instead of with the next rows."""
        self.state.upload()

    def free(self, slot: int) -> None:
        """Give back what a slot holds; safe to call twice."""
        self.state.free(slot)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        row_flags: Ints | None = None,
        *,
        host_slots: HostSlots | None = None,
        masks: Masks | None = None,
    ) -> Sampled:
        """One token a row, remembered for the slots but in HOST_TOKEN rows, where the host chooses.

        Args:
            logits: [rows, vocab], contiguous. Working memory: written to. Rules and draws are computed in float32.
            slots: int64 [rows]. No slot stands in two rows.
            lengths: int64 or int32 [rows], tokens of the sequence (prompt and output) before the sampled one.
            row_flags: the seam's row flags [rows], on the host; None is no HOST_TOKEN.
            host_slots: the same numbers as `slots`, on the host; without them they are read back.
            masks: what the grammars of some rows allow.
        """
        host = _host_slots(slots, host_slots)
        sampled = self.choose(logits, slots, lengths, host_slots=host, masks=masks)
        by_host = None
        if row_flags is not None:
            by_host = (row_flags & HOST_TOKEN) != 0
            if by_host.any():
                index = to_device(by_host, self.device)
                sampled.done.logical_and_(~index)
        self.commit(sampled.tokens, host_slots=host, without=_without(by_host, sampled.errors, len(slots)))
        return sampled

    def choose(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        *,
        host_slots: HostSlots | None = None,
        pending: Tensor | None = None,
        purpose: Purpose = Purpose.SAMPLE,
        masks: Masks | None = None,
    ) -> Sampled:
        """One token a row, nothing remembered. Arguments as in `sample`, but a slot may stand in several rows.

        Args:
            pending: int64 [rows, n], padded with -1: tokens that come after the committed ones, counted in
                `lengths`. Penalties, bad words, n-grams and processors see them as output.
        """
        assert logits.is_floating_point() and logits.shape == (len(slots), self.vocab_size)
        assert logits.is_contiguous()
        host = _host_slots(slots, host_slots)
        features = self.state.features[host]
        any_features = int(np.bitwise_or.reduce(features, initial=0))
        if self._by_kernels and pending is None and any_features:
            return self._choose_by_kernels(logits, slots, lengths.long(), host, purpose=purpose, masks=masks)
        if any_features:
            logits = logits.float()
        step = StepRows(host, features, any_features, self.state.rows(slots), lengths.long(), pending)
        self._mask_padding(logits)
        raw = self._keep_raw(step, logits)
        if any_features & ALTERED:
            self._alter(step, logits)
            if masks is not None:
                mask_logits(logits, masks.rows, masks.bits)
            self._mask_padding(logits)  # whatever a processor wrote there
        tokens = self._tokens(step, logits, purpose)
        reports: list[Report] = []
        if any_features & LOGPROBS:
            reports = self._report(step, logits, tokens, raw)
        return Sampled(tokens, _done(step, tokens), step.errors, reports, self.state.num_logprobs[host])

    def _choose_by_kernels(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        host: NDArray[np.int64],
        *,
        purpose: Purpose,
        masks: Masks | None,
    ) -> Sampled:
        """`choose` where only the late rules of few rows need the host."""
        features = self.state.features[host]
        any_features = int(np.bitwise_or.reduce(features, initial=0))
        step = StepRows(host, features, any_features, self.state.rows(slots), lengths, None)
        self._mask_padding(logits)
        shaped = logits
        if any_features & ALTERED:
            shaped = shape_logits(logits, slots, lengths, self.state.table, num_valid=self.num_valid_ids)
            self._alter_late(step, shaped)
            if masks is not None:
                mask_logits(shaped, masks.rows, masks.bits)
            self._mask_padding(shaped)
        is_random = any_features & RANDOM
        tokens = (
            draw_rows(shaped, slots, lengths, self.state.table, purpose=purpose) if is_random else row_argmax(shaped)
        )
        reports: list[Report] = []
        if any_features & LOGPROBS:
            is_raw = (features & LOGPROBS != 0) & (features & PROCESSED == 0) & (features & ALTERED != 0)
            group = RowGroup.where(is_raw, self.device)
            raw = Raw(group, group.take(logits).float()) if is_raw.any() else None
            reports = self._report(step, shaped.float(), tokens, raw)
        return Sampled(tokens, _done(step, tokens), step.errors, reports, self.state.num_logprobs[host])

    def choose_captured(self, logits: Tensor, slots: Tensor, lengths: Tensor, *, is_shaped: bool) -> Tensor:
        """`choose` for rows of any slots without late rules, all on the device: what a CUDA graph may hold.

        Args:
            logits: [rows, vocab], contiguous, of any float dtype; left as they are but for padding ids.
            is_shaped: whether a row is drawn or has rules.
        """
        self._mask_padding(logits)
        if not is_shaped:
            return row_argmax(logits)
        table = self.state.table
        shaped = shape_logits(logits, slots, lengths, table, num_valid=self.num_valid_ids)
        return draw_rows(shaped, slots, lengths, table, purpose=Purpose.SAMPLE)

    def report(self, logits: Tensor, tokens: Tensor, *, host_slots: HostSlots) -> Sampled:
        """Raw log-probabilities of tokens that were chosen without them; `done` is all false.

        Args:
            logits: [rows, vocab] as `choose_captured` left them.
            tokens: int64 [rows].
        """
        host = host_slots.astype(np.int64)
        features = self.state.features[host] & LOGPROBS
        step = StepRows(host, features, LOGPROBS, self.state.rows(tokens.new_zeros(0)), tokens, None)
        done = torch.zeros_like(tokens, dtype=torch.bool)
        reports: list[Report] = []
        if features.any():
            group = step.where(LOGPROBS)
            reports.append(self._measure(step, tokens, group, lambda part: group.take(logits, part).float()))
        return Sampled(tokens, done, {}, reports, self.state.num_logprobs[host])

    def _alter_late(self, step: StepRows, logits: Tensor) -> None:
        """Rules that look at the tokens so far, on the rows that have them."""
        for row in np.flatnonzero(step.features & SPECIAL).tolist():
            special = self.state.specials[int(step.slots[row])]
            if special.error:
                step.errors[row] = special.error
                continue
            special.ban_late(logits[row], ())
            if special.processors:
                error = special.process(logits[row], ())
                if error:
                    step.errors[row] = error

    def commit(
        self,
        tokens: Tensor,
        *,
        host_slots: HostSlots,
        num_accepted: Tensor | None = None,
        without: NDArray[np.bool_] | None = None,
    ) -> None:
        """Remember accepted tokens for the slots whose rules look back; nothing to do for the others.

        Args:
            tokens: int64 [rows] or [rows, n].
            host_slots: [rows], on the host; no slot stands in two rows.
            num_accepted: int64 [rows], how many of the n are accepted; None is all.
            without: bool [rows], rows to leave out.
        """
        features = self.state.features[host_slots] & (PENALTIES | LATE)
        if without is not None:
            features = np.where(without, 0, features)
        if not features.any():
            return
        tokens = tokens[:, None] if tokens.dim() == 1 else tokens
        counted = RowGroup.where(features & PENALTIES != 0, self.device)
        if len(counted):
            self._count(counted, tokens, num_accepted, host_slots[counted.host])
        late_rows = np.flatnonzero(features & LATE).tolist()
        if late_rows:
            late = LateTokens(tokens, num_accepted)
            for row in late_rows:
                history = self.state.specials[int(host_slots[row])].history
                if history is not None:
                    history.add_late(late, row)

    def _count(self, group: RowGroup, tokens: Tensor, num_accepted: Tensor | None, host_slots: HostSlots) -> None:
        some = group.take(tokens)
        accepted = torch.ones_like(some, dtype=torch.bool)
        if num_accepted is not None:
            places = torch.arange(some.shape[1], device=self.device)
            accepted = places < group.take(num_accepted)[:, None]
        pool_rows = to_device(self.state.counts_rows[host_slots], self.device)
        self.state.counts.add(pool_rows, some, accepted)

    def _mask_padding(self, logits: Tensor) -> None:
        if self.num_valid_ids < self.vocab_size:
            logits[:, self.num_valid_ids :] = -torch.inf

    def _keep_raw(self, step: StepRows, logits: Tensor) -> Raw | None:
        """A copy of the raw logits of the rows that report them and are about to be rewritten."""
        if not (step.any_features & LOGPROBS and step.any_features & ALTERED):
            return None
        has_raw = (step.features & LOGPROBS != 0) & (step.features & PROCESSED == 0)
        mask = has_raw & (step.features & ALTERED != 0)
        if not mask.any():
            return None
        group = RowGroup.where(mask, self.device)
        return Raw(group, logits.clone() if group.index is None else group.take(logits))

    def _alter(self, step: StepRows, logits: Tensor) -> None:
        pending_lists: dict[int, list[int]] = {}
        special_rows = np.flatnonzero(step.features & SPECIAL).tolist()
        if special_rows and step.pending is not None and step.any_features & LATE:
            pending = step.pending.tolist()
            pending_lists = {row: [token for token in pending[row] if token >= 0] for row in special_rows}
        specials = {row: self.state.specials[int(step.slots[row])] for row in special_rows}
        for row, special in specials.items():
            if special.error:
                step.errors[row] = special.error
            else:
                special.shape(logits[row], pending_lists.get(row, ()))
        if step.any_features & PENALTIES:
            self._penalise(step, logits)
        if step.any_features & STOP_MASK:
            group = step.where(STOP_MASK)
            params = step.params.take(group)
            active = group.take(step.lengths) + 1 <= params.min_len
            rows = group.take(torch.arange(len(logits), device=self.device))
            mask_stop_ids(logits, params.stop_ids, rows=rows, active=active)
        for row, special in specials.items():
            if special.processors:
                error = special.process(logits[row], pending_lists.get(row, ()))
                if error:
                    step.errors[row] = error

    def _penalise(self, step: StepRows, logits: Tensor) -> None:
        group = step.where(PENALTIES)
        for part in group.parts(self.vocab_size):
            params = step.params.take(group, part)
            pending = None if step.pending is None else group.take(step.pending, part)
            counts = self.state.counts.gather(params.counts_row, pending)
            result = penalised(
                group.take(logits, part),
                counts,
                repetition=params.repetition,
                presence=params.presence,
                frequency=params.frequency,
            )
            group.put(logits, result, part)

    def _tokens(self, step: StepRows, logits: Tensor, purpose: Purpose) -> Tensor:
        if not step.any_features & RANDOM:
            return row_argmax(logits)
        noise = uniform(step.params.seed, step.lengths, purpose)
        is_random = step.features & RANDOM != 0
        tokens = noise.new_empty(len(noise), dtype=torch.int64) if is_random.all() else row_argmax(logits)
        top_k = self.state.top_k[step.slots]
        for mask, draw in ways(step, is_random, top_k):
            if not mask.any():
                continue
            group = RowGroup.where(mask, self.device)
            for part in group.parts(self.vocab_size):
                drawn = draw(group.take(logits, part), step.params.take(group, part), group.take(noise, part))
                group.put(tokens, drawn, part)
        return tokens

    def _report(self, step: StepRows, logits: Tensor, tokens: Tensor, raw: Raw | None) -> list[Report]:
        """Log-probabilities of three kinds of rows: kept raw copies, what was drawn from, logits as they are now."""
        wants = step.features & LOGPROBS != 0
        is_drawn = wants & (step.features & PROCESSED != 0) & (step.features & RANDOM != 0)
        as_they_are = wants & ~is_drawn
        reports: list[Report] = []
        if raw is not None:
            as_they_are[raw.group.host] = False
            reports.append(self._measure(step, tokens, raw.group, lambda part: raw.logits[part]))
        if as_they_are.any():
            plain = RowGroup.where(as_they_are, self.device)
            reports.append(self._measure(step, tokens, plain, lambda part: plain.take(logits, part)))
        if is_drawn.any():
            drawn = RowGroup.where(is_drawn, self.device)
            is_ranked = bool((step.features[drawn.host] & RANKED).any())

            def distribution(part: slice) -> Tensor:
                return filtered(drawn.take(logits, part), step.params.take(drawn, part), is_ranked=is_ranked)

            reports.append(self._measure(step, tokens, drawn, distribution))
        return reports

    def _measure(self, step: StepRows, tokens: Tensor, group: RowGroup, logits_of: Callable[[slice], Tensor]) -> Report:
        k = min(int(self.state.num_logprobs[step.slots[group.host]].max()), self.num_valid_ids)
        found = measure_in_chunks(logits_of, group.take(tokens), k, vocab_size=self.vocab_size)
        return Report(group, found.to_host())


def _done(step: StepRows, tokens: Tensor) -> Tensor:
    """[rows] bool: the sequence ends with this token."""
    params = step.params
    length = step.lengths + 1
    is_stop = (tokens[:, None] == params.stop_ids).any(1) & (length > params.min_len)
    return is_stop | (length >= params.max_len)


def _host_slots(slots: Tensor, host_slots: HostSlots | None) -> NDArray[np.int64]:
    return (slots.cpu().numpy() if host_slots is None else host_slots).astype(np.int64)


def _without(by_host: NDArray[np.bool_] | None, errors: dict[int, str], num_rows: int) -> NDArray[np.bool_] | None:
    if not errors:
        return by_host
    without = np.zeros(num_rows, dtype=np.bool_) if by_host is None else by_host.copy()
    without[list(errors)] = True
    return without
