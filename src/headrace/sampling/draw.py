"""Draws: one token a row by inverse CDF, in the order of ids, with one uniform number each.

So the token is a function of the row's own distribution and number; ways that filter differently but keep the
same tokens agree. Everything here takes rows of any part of a batch and returns int64 ids [rows].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.sampling.filters import Candidates, candidates, mask_min_p, scaled, survivors
from headrace.sampling.sampled import StepRows
from headrace.sampling.state import MIN_P, RANKED, RowParams

MAX_NARROW = 1024
"""Candidates that are selected without a full sort."""

Draw = Callable[[Tensor, RowParams, Tensor], Tensor]
"""(logits, parameters, noise) of some rows -> their tokens."""


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds uniform * total; the row length when no weight is positive.

    Args:
        weights: [rows, n], not negative, not normalised.
        uniform: float64 [rows], in (0, 1).
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # strictly under the total, whatever rounding does: an index past the last positive weight can't come
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target.contiguous(), right=True)[:, 0]


def draw_any(logits: Tensor, params: RowParams, uniform: Tensor, *, has_min_p: bool) -> Tensor:
    """Rows without top_k and top_p: no ranking is needed."""
    scaled_logits, peaks = scaled(logits, params.temperature)
    if has_min_p:
        scaled_logits = mask_min_p(scaled_logits, params)
    # softmax and not exp: it works row by row, where exp's rounding may depend on the place in the batch
    index = inverse_cdf(scaled_logits.softmax(1), uniform)
    return torch.where(index < logits.shape[1], index, peaks)


def draw_top_k(logits: Tensor, params: RowParams, uniform: Tensor, *, num: int) -> Tensor:
    """Rows whose top_k is 1 .. `num`."""
    scaled_logits, _ = scaled(logits, params.temperature)
    return _draw_candidates(candidates(logits, scaled_logits, params, num=num, mass=None), uniform)


def draw_top_p(logits: Tensor, params: RowParams, uniform: Tensor) -> Tensor:
    """Rows without top_k: top_p almost always cuts within the first candidates; the others are sorted.

    Asks the device once whether it did, which waits for the step's forward pass: far less than a sort.
    """
    scaled_logits, _ = scaled(logits, params.temperature)
    mass = survivors(scaled_logits, params)
    num = min(MAX_NARROW, logits.shape[1])
    found = candidates(logits, scaled_logits, params, num=num, mass=mass)
    tokens = _draw_candidates(found, uniform)
    if num < logits.shape[1]:
        open_rows = (~found.is_complete).nonzero()[:, 0]
        if len(open_rows):
            some = RowParams(params.floats.index_select(0, open_rows), params.ints.index_select(0, open_rows))
            tokens[open_rows] = draw_sorted(logits[open_rows], some, uniform[open_rows])
    return tokens


def draw_sorted(logits: Tensor, params: RowParams, uniform: Tensor) -> Tensor:
    """Rows with any filters, by a full sort."""
    return draw_top_k(logits, params, uniform, num=logits.shape[1])


def _draw_candidates(found: Candidates, uniform: Tensor) -> Tensor:
    by_id = found.ids.sort(dim=1)
    index = inverse_cdf(found.weights.gather(1, by_id.indices), uniform)
    num = found.ids.shape[1]
    drawn = by_id.values.gather(1, index.clamp(max=num - 1)[:, None])[:, 0]
    return torch.where(index < num, drawn, found.ids[:, 0])


def ways(
    step: StepRows, is_random: NDArray[np.bool_], top_k: NDArray[np.int64]
) -> list[tuple[NDArray[np.bool_], Draw]]:
    """Which rows are drawn how; the cheapest way that each row's own filters allow."""
    is_ranked = step.features & RANKED != 0
    is_any = is_random & ~is_ranked
    if is_any.all():
        return [(is_any, partial(draw_any, has_min_p=bool(step.any_features & MIN_P)))]
    is_narrow = is_random & (top_k > 0) & (top_k <= MAX_NARROW)
    return [
        (is_any, partial(draw_any, has_min_p=bool(step.any_features & MIN_P))),
        (is_narrow, partial(draw_top_k, num=int(top_k[is_narrow].max(initial=0)))),
        (is_random & (top_k > MAX_NARROW), draw_sorted),
        (is_random & is_ranked & (top_k == 0), draw_top_p),
    ]
