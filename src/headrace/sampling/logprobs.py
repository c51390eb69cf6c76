"""Log-probabilities: of the chosen token, of the top K, and the chosen token's rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.filters import best_ids
from headrace.sampling.rows import Upload, chunks
from headrace.seam import RowLogprobs

FLOOR = -9999.0
"""Instead of minus infinity (and of not-a-number), which JSON can't carry."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some positions, still on the device: the chosen token first, then the top K."""

    ids: Tensor  # [positions, 1 + K] int64
    values: Tensor  # [positions, 1 + K] float32
    ranks: Tensor  # [positions] int64, 1 = most likely; ties go to the smaller id

    def to_host(self) -> HostLogprobs:
        return HostLogprobs(Upload(self.ids), Upload(self.values), Upload(self.ranks))


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log-probabilities on their way to the host."""

    ids: Upload
    values: Upload
    ranks: Upload

    def wait(self) -> RowLogprobs:
        return RowLogprobs(
            ids=self.ids.wait().astype(np.int32), values=self.values.wait(), ranks=self.ranks.wait().astype(np.int32)
        )


def measure(logits: Tensor, chosen: Tensor, k: int) -> LogprobTensors:
    """Log-probabilities under the softmax of `logits`.

    Args:
        logits: float32 [positions, vocab]; -inf where a token can't come.
        chosen: int64 [positions]; an id outside the vocabulary has the floor and the last rank.
        k: 0 .. vocab.
    """
    vocab_size = logits.shape[1]
    is_inside = (chosen >= 0) & (chosen < vocab_size)
    inside = torch.where(is_inside, chosen, 0)[:, None]
    logprobs = logits.clamp(max=torch.finfo(logits.dtype).max).log_softmax(1)
    best = best_ids(logits, k) if k > 0 else inside[:, :0]
    values = logprobs.gather(1, torch.cat([inside, best], dim=1)).nan_to_num_(nan=FLOOR).clamp_(min=FLOOR)
    values[:, 0] = torch.where(is_inside, values[:, 0], FLOOR)
    own = logits.gather(1, inside)
    smaller_id = torch.arange(vocab_size, device=logits.device) < inside
    ranks = 1 + ((logits > own) | ((logits == own) & smaller_id)).sum(1)
    ids = torch.cat([chosen[:, None], best], dim=1)
    return LogprobTensors(ids, values, torch.where(is_inside, ranks, vocab_size))


def measure_in_chunks(
    logits_of: Callable[[slice], Tensor], chosen: Tensor, k: int, *, vocab_size: int
) -> LogprobTensors:
    """`measure` over any number of positions in bounded memory.

    Args:
        logits_of: gives the float32 logits [stop - start, vocab] of a slice of the positions.
        chosen: int64 [positions].
    """
    parts = [measure(logits_of(part), chosen[part], k) for part in chunks(len(chosen), vocab_size)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = chosen.new_empty(0, 1 + k)
        return LogprobTensors(empty, empty.float(), chosen)
    return LogprobTensors(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )


def prompt_logprobs(
    logits_of: Callable[[slice], Tensor], targets: Tensor, k: int, *, vocab_size: int, num_valid_ids: int
) -> HostLogprobs:
    """Log-probabilities of a chunk's prompt tokens; the logits [tokens, vocab] never exist as a whole. Doesn't wait.

    Args:
        logits_of: gives float32 logits [stop - start, vocab] of a slice of the chunk's positions. They are
            working memory: written to.
        targets: int64 [tokens], the token that follows each position.
        k: 0 for the targets alone, else the top K as well (all ids, when there are fewer).
        num_valid_ids: ids from here on are padding of the embedding and have no probability.
    """

    def valid(part: slice) -> Tensor:
        logits = logits_of(part)
        logits[:, num_valid_ids:] = -torch.inf
        return logits

    return measure_in_chunks(valid, targets, min(k, num_valid_ids), vocab_size=vocab_size).to_host()
