"""Sampling parameters by slot: a host copy that is written, and the device tensors that follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels import slot_table as columns
from headrace.kernels.slot_table import SlotTable
from headrace.sampling.biases import TokenBiases
from headrace.sampling.counts import TokenCounts
from headrace.sampling.rows import RowGroup, to_device
from headrace.sampling.specials import Specials, build_specials, is_special, needs_late_tokens
from headrace.seam import SlotInit
from headrace.seeds import as_int64
from headrace.types import GREEDY_TEMPERATURE, Sampling

# What a slot needs of a step, as bits that the host reads without asking the device.
RANDOM = 1  # a draw; without it the row is greedy and nothing of temperature and filters applies
RANKED = 2  # top_k or top_p
MIN_P = 4
PENALTIES = 8
STOP_MASK = 16  # min_len: stop ids are masked at first
SPECIAL = 32  # an entry in SlotParams.specials
LATE = 64  # the host follows the tokens
LOGPROBS = 128
PROCESSED = 256  # log-probabilities of what is drawn from, not of the raw logits
RAW_LOGITS = 512  # the engine hands the raw logits out
GRAMMAR = 1024  # the engine brings a mask
CAPPED = 2048  # the engine brings a mask in few steps, and knows in which

ALTERED = PENALTIES | STOP_MASK | SPECIAL | GRAMMAR | CAPPED  # the logits themselves are rewritten
CAPTURABLE = RANDOM | RANKED | MIN_P | PENALTIES | STOP_MASK | SPECIAL | LOGPROBS | CAPPED
"""Needs nothing of the host in a step."""

_NO_ROW = -1


@dataclass(frozen=True, slots=True)
class RowParams:
    """The parameters of some rows of a step, gathered from their slots."""

    floats: Tensor  # [rows, columns] float64
    ints: Tensor  # [rows, columns + stop ids] int64

    def take(self, group: RowGroup, part: slice = slice(None)) -> RowParams:
        return RowParams(group.take(self.floats, part), group.take(self.ints, part))

    @property
    def temperature(self) -> Tensor:
        return self.floats[:, columns.TEMPERATURE]

    @property
    def top_k(self) -> Tensor:
        """0 is off; never as large as the vocabulary."""
        return self.ints[:, columns.TOP_K]

    @property
    def top_p(self) -> Tensor:
        """Infinite is off."""
        return self.floats[:, columns.TOP_P]

    @property
    def log_min_p(self) -> Tensor:
        """Minus infinity is off."""
        return self.floats[:, columns.LOG_MIN_P]

    @property
    def repetition(self) -> Tensor:
        return self.floats[:, columns.REPETITION]

    @property
    def presence(self) -> Tensor:
        return self.floats[:, columns.PRESENCE]

    @property
    def frequency(self) -> Tensor:
        return self.floats[:, columns.FREQUENCY]

    @property
    def seed(self) -> Tensor:
        return self.ints[:, columns.SEED]

    @property
    def min_len(self) -> Tensor:
        return self.ints[:, columns.MIN_LEN]

    @property
    def max_len(self) -> Tensor:
        return self.ints[:, columns.MAX_LEN]

    @property
    def counts_row(self) -> Tensor:
        return self.ints[:, columns.COUNTS]

    @property
    def stop_ids(self) -> Tensor:
        """[rows, K], padded with -1."""
        return self.ints[:, columns.NUM_INTS :]


class SlotParams:
    """Parameters of `num_slots` slots. Written by `begin`, uploaded when rows are next gathered.

    `features`, `num_logprobs`, `top_k`, `counts_rows` are host arrays by slot;
    `specials` holds the slots with rare rules.
    Slots without penalties, bias or bans cost a few numbers, never a vocabulary-sized row.
    """

    def __init__(self, num_slots: int, vocab_size: int, *, device: torch.device) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = device
        self.features = np.zeros(num_slots, dtype=np.int32)
        self.num_logprobs = np.full(num_slots, -1, dtype=np.int32)
        self.specials: dict[int, Specials] = {}
        self.counts = TokenCounts(vocab_size, device)
        self.biases = TokenBiases(device)
        self._floats = np.zeros((num_slots, columns.NUM_FLOATS), dtype=np.float64)
        self._ints = np.full((num_slots, columns.NUM_INTS), _NO_ROW, dtype=np.int64)
        self._device_floats = to_device(self._floats.copy(), device)
        self._device_ints = to_device(self._ints.copy(), device)
        self._changed: set[int] = set()

    @property
    def top_k(self) -> NDArray[np.int64]:
        return self._ints[:, columns.TOP_K]

    @property
    def counts_rows(self) -> NDArray[np.int64]:
        """Rows in the pool of counts, for slots with PENALTIES."""
        return self._ints[:, columns.COUNTS]

    @property
    def table(self) -> SlotTable:
        """What kernels read, as of the last `upload`."""
        return SlotTable(self._device_floats, self._device_ints, self.counts.pool, self.biases.ids, self.biases.values)

    @property
    def places(self) -> tuple[int, ...]:
        """Where `table` is in memory; captured graphs hold these addresses."""
        table = self.table
        tensors = (table.floats, table.ints, table.counts, table.bias_ids, table.bias_values)
        return tuple(tensor.data_ptr() for tensor in tensors)

    def begin(self, init: SlotInit) -> None:
        """Give a slot to a request, or back to a preempted one. A bad parameter fails the slot's rows only."""
        slot, sampling = init.slot, init.sampling
        self.free(slot)
        features = self._features(init)
        self._floats[slot] = (
            sampling.temperature if features & RANDOM else 0.0,
            math.inf if sampling.top_p >= 1.0 else sampling.top_p,
            math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        stop_ids = [token for token in init.stop_ids if 0 <= token < self.vocab_size]
        self._reserve_stop_ids(len(stop_ids))
        self._ints[slot] = _NO_ROW
        mask_len = init.min_len if features & STOP_MASK else 0
        self._ints[slot, : columns.COUNTS] = (as_int64(sampling.seed), top_k, init.min_len, init.max_len, mask_len)
        self._ints[slot, columns.NUM_INTS : columns.NUM_INTS + len(stop_ids)] = stop_ids
        if features & PENALTIES:
            assert init.history is not None, "sampling.needs_history: the plan carries all tokens so far"
            self._ints[slot, columns.COUNTS] = self.counts.take(
                init.history, prompt_len=init.prompt_len, ignored=sampling.prompt_ignore_length
            )
        if features & SPECIAL:
            special = build_specials(init, vocab_size=self.vocab_size, device=self.device)
            self.specials[slot] = special
            if special.error:
                features |= LATE  # the host fails its rows
            if special.has_biases:
                self._ints[slot, columns.BIASES] = self.biases.take(sampling)
        self.features[slot] = features
        self.num_logprobs[slot] = sampling.logprobs
        self._changed.add(slot)

    def free(self, slot: int) -> None:
        """Give back what the slot holds; safe on a slot that holds nothing."""
        assert 0 <= slot < self.num_slots
        for column, pool in ((columns.COUNTS, self.counts), (columns.BIASES, self.biases)):
            row = int(self._ints[slot, column])
            if row != _NO_ROW:
                pool.release(row)
                self._ints[slot, column] = _NO_ROW
        self.specials.pop(slot, None)
        self.features[slot] = 0
        self.num_logprobs[slot] = -1

    def rows(self, slots: Tensor) -> RowParams:
        """The parameters of `slots` int64 [rows]; a slot may stand in several rows."""
        self.upload()
        return RowParams(self._device_floats.index_select(0, slots), self._device_ints.index_select(0, slots))

    def _features(self, init: SlotInit) -> int:
        sampling = init.sampling
        features = 0
        if not is_greedy(sampling):
            features |= RANDOM
            if 0 < sampling.top_k < self.vocab_size or sampling.top_p < 1.0:
                features |= RANKED
            if sampling.min_p > 0.0:
                features |= MIN_P
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            features |= PENALTIES
        if init.grammar is not None:
            features |= GRAMMAR  # whose masks know of the least length
        elif init.min_len > init.prompt_len and init.stop_ids:
            features |= STOP_MASK
        if init.thinking is not None:
            features |= CAPPED
        if is_special(sampling):
            features |= SPECIAL
            if needs_late_tokens(sampling):
                features |= LATE
        if sampling.return_logits:
            features |= RAW_LOGITS
        if sampling.logprobs >= 0:
            features |= LOGPROBS
            if sampling.processed_logprobs:
                features |= PROCESSED
        return features

    def _reserve_stop_ids(self, num: int) -> None:
        have = self._ints.shape[1] - columns.NUM_INTS
        if num <= have:
            return
        width = max(1, have)
        while width < num:
            width *= 2
        more = np.full((self.num_slots, width - have), -1, dtype=np.int64)
        self._ints = np.concatenate([self._ints, more], axis=1)
        self._device_ints = torch.cat([self._device_ints, to_device(more, self.device)], dim=1)

    def upload(self) -> None:
        """Bring changed slots to the device."""
        if not self._changed:
            return
        slots = np.fromiter(self._changed, dtype=np.int64)
        self._changed.clear()
        index = to_device(slots, self.device)
        self._device_floats.index_copy_(0, index, to_device(self._floats[slots], self.device))
        self._device_ints.index_copy_(0, index, to_device(self._ints[slots], self.device))


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is all that can come: no draw, no division by the temperature."""
    return (
        sampling.temperature < GREEDY_TEMPERATURE
        or sampling.top_k == 1
        or sampling.top_p <= 0.0
        or sampling.min_p >= 1.0
    )
