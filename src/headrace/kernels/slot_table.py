"""Sampling parameters by slot, as the kernels read them: which column is what."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["SlotTable"]

TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
"""Columns of `floats`. Temperature 0 is greedy, whatever stands in the others; top_p infinite and log_min_p minus
infinite are off."""
SEED, TOP_K, MIN_LEN, MAX_LEN, MASK_LEN, COUNTS, BIASES = range(7)
"""Columns of `ints`. top_k 0 is off; stop ids are masked while the sequence, with the
new token, is not longer than MASK_LEN; rows of pools are -1 where there is none."""
NUM_FLOATS, NUM_INTS = 6, 7


@dataclass(frozen=True, slots=True)
class SlotTable:
    floats: Tensor  # [slots, NUM_FLOATS] float64
    ints: Tensor  # [slots, NUM_INTS + stop ids] int64, stop ids padded with -1
    counts: Tensor  # [pool rows, vocab] int32: 2 * (times generated) + (1 when the prompt has the token)
    bias_ids: Tensor  # [pool rows, n] int64, padded with -1
    bias_values: Tensor  # [pool rows, n] float32; minus infinity bans
