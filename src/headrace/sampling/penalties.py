"""What rewrites logits before temperature, on whole groups of rows: penalties and the mask of stop ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def penalised(logits: Tensor, counts: Tensor, *, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Repetition (Keskar et al., "CTRL", 2019), then frequency and presence penalties (OpenAI API reference).

    Args:
        logits: float32 [rows, vocab].
        counts: int32 [rows, vocab], 2 * (times generated) + (1 when the prompt has the token).
        repetition: float64 [rows], above 0; divides positive and multiplies negative logits of seen tokens.
        presence: float64 [rows], subtracted once from the logit of each generated token.
        frequency: float64 [rows], subtracted for each time it was generated.
    """
    factor = repetition.float()[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    generated = counts >> 1
    result = torch.where(counts > 0, repeated, logits)
    result -= generated * frequency.float()[:, None]
    result -= (generated > 0) * presence.float()[:, None]
    return result


def mask_stop_ids(logits: Tensor, stop_ids: Tensor, *, rows: Tensor, active: Tensor) -> None:
    """Ban the stop ids of some rows, in place.

    Args:
        logits: float32 [batch, vocab], contiguous.
        stop_ids: int64 [rows, K], padded with -1; a padding entry masks nothing.
        rows: int64 [rows], their place in the batch.
        active: bool [rows], whether a row's stop ids are banned now.
    """
    banned = (stop_ids >= 0) & active[:, None]
    cells = rows[:, None] * logits.shape[1] + stop_ids.clamp(min=0)
    # the smaller of logit and bound, so that padding (bound +inf, on id 0) changes nothing
    bounds = torch.where(banned, -math.inf, math.inf).to(logits.dtype)
    logits.view(-1).scatter_reduce_(0, cells.view(-1), bounds.view(-1), "amin")
