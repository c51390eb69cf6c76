"""A token for each row of logits: the most likely one, or a draw after min_p, top_k and top_p. No row is sorted.

Tokens are ranked by (logit, largest first; id, smallest first); each filter keeps a prefix of the ranking, the first
token always stays. The draw is by inverse CDF in the order of ids.

Weights are whole numbers, so sums don't depend on their order: a row's token is the same in any batch, and the same as
the torch form's wherever both compute the same exponentials.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels import slot_table as columns
from headrace.kernels.row_argmax import row_argmax_twin
from headrace.kernels.row_noise import row_noise
from headrace.kernels.slot_table import SlotTable

__all__ = ["draw_rows"]

WEIGHT_BITS = 40
"""The most likely token weighs 2 ** WEIGHT_BITS; what is less likely by more than that factor can't come."""


def draw_rows(logits: Tensor, slots: Tensor, lengths: Tensor, table: SlotTable, *, purpose: int = 0) -> Tensor:
    """
    Args:
        logits: [rows, vocab] of any float dtype, rows contiguous; -inf where a token can't come. Read only.
        slots: [rows] int64, whose parameters each row has.
        lengths: [rows] int64, tokens of the sequence before the one that is drawn.
        purpose: `Purpose` of the noise.

    Returns:
        [rows] int64. Greedy rows, rows without any finite logit and rows with a NaN: the argmax.
    """
    if not logits.is_cuda:
        return draw_rows_twin(logits, slots, lengths, table, purpose=purpose)
    from headrace.kernels._triton_draw import launch_draw

    return launch_draw(logits, slots, lengths, table, purpose=purpose)


def draw_rows_twin(logits: Tensor, slots: Tensor, lengths: Tensor, table: SlotTable, *, purpose: int = 0) -> Tensor:
    """The plain torch form of `draw_rows`, by a full sort."""
    floats, ints, logits = table.floats[slots], table.ints[slots], logits.float()
    best = row_argmax_twin(logits)
    peaks = logits.gather(1, best[:, None])
    weights = _weights(logits, peaks, floats)
    order = _rank_keys(logits).sort(dim=1, descending=True).indices
    ranks = torch.arange(logits.shape[1], device=logits.device)
    top_k = ints[:, columns.TOP_K, None]
    ranked = weights.gather(1, order) * ((ranks < top_k) | (top_k == 0))
    through = ranked.cumsum(1)
    bounds = (floats[:, columns.TOP_P] * through[:, -1].double()).clamp(max=2.0**62).ceil().long()
    ranked = ranked * (through - ranked < bounds[:, None])
    cumulative = torch.zeros_like(weights).scatter_(1, order, ranked).cumsum(1)
    total = cumulative[:, -1]
    noise = row_noise(ints[:, columns.SEED], lengths, purpose)
    target = torch.minimum((noise * total.double()).long(), total - 1)
    drawn = (cumulative <= target[:, None]).sum(1)
    is_drawn = (floats[:, columns.TEMPERATURE] > 0) & peaks[:, 0].isfinite().logical_or(peaks[:, 0] == math.inf)
    return torch.where(is_drawn, drawn.clamp(max=logits.shape[1] - 1), best)


def _weights(logits: Tensor, peaks: Tensor, floats: Tensor) -> Tensor:
    """[rows, vocab] int64"""
    top = peaks.clamp(max=torch.finfo(torch.float32).max)
    scaled = ((logits - top) * floats[:, columns.TEMPERATURE, None].float().reciprocal()).clamp(max=0.0)
    weights = ((scaled * math.log2(math.e)).exp2() * 2.0**WEIGHT_BITS).nan_to_num(0.0).long()
    return weights.masked_fill(scaled < floats[:, columns.LOG_MIN_P, None].float(), 0)


def _rank_keys(logits: Tensor) -> Tensor:
    """int64 [rows, vocab], all different within a row; descending order is the ranking."""
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(logits.shape[1], device=logits.device)
