"""min_p, top_k and top_p: which tokens of a row may be drawn. The order is the reference's: min_p, top_k, top_p.

Tokens are ranked by (logit, largest first; id, smallest first), so a tie at the edge keeps the smaller id and
`top_k = 1` is greedy. Each filter keeps a prefix of the ranking, and the first token always stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.sampling.state import RowParams

_LOW_32_BITS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of each row, in rank order."""

    ids: Tensor  # [rows, num] int64
    weights: Tensor  # [rows, num] float64: exp of the scaled logits, 0 where a filter dropped the token
    kept: Tensor  # [rows, num] bool

    @property
    def is_complete(self) -> Tensor:
        """[rows] bool: a filter cut within the candidates, so none is missing."""
        return ~self.kept[:, -1]


def rank_keys(logits: Tensor) -> Tensor:
    """int64 [rows, vocab], all different within a row; descending order is the ranking. Id = `key_ids(key)`."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: equal logits get equal bits
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as signed integers, in the order of the floats
    vocab_size = logits.shape[1]
    return ordered.long() * (1 << 32) + torch.arange(vocab_size - 1, -1, -1, device=logits.device)


def key_ids(keys: Tensor, vocab_size: int) -> Tensor:
    return (vocab_size - 1) - (keys & _LOW_32_BITS)


def best_ids(logits: Tensor, num: int) -> Tensor:
    """The `num` first ids [rows, num] of each row's ranking."""
    keys = rank_keys(logits)
    if num < logits.shape[1]:
        top = keys.topk(num, dim=1).values
    else:
        top = keys.sort(dim=1, descending=True).values
    return key_ids(top, logits.shape[1])


def scaled(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """(logits - maximum) / temperature as float32 [rows, vocab], and the ids [rows] of the maxima.

    The maximum goes first: logits / 1e-5 may overflow, a difference divided may only reach -inf, which is
    the weight 0. No row yields NaN but one that holds NaN or has every token banned. The division is a product with
    1 / temperature, rounded first, as in the kernels.
    """
    limits = torch.finfo(logits.dtype)
    peak = logits.max(dim=1, keepdim=True)
    result = logits - peak.values.clamp(limits.min, limits.max)
    result.mul_(temperature[:, None].float().reciprocal_()).clamp_(max=0.0)  # a logit of +inf becomes 0 here
    return result, peak.indices[:, 0]


def mask_min_p(scaled_logits: Tensor, params: RowParams) -> Tensor:
    """Scaled logits with -inf where the probability is under min_p times the largest one."""
    return scaled_logits.masked_fill(scaled_logits < params.log_min_p.float()[:, None], -math.inf)


def candidates(
    logits: Tensor, scaled_logits: Tensor, params: RowParams, *, num: int, mass: Tensor | None
) -> Candidates:
    """Filter the `num` best tokens of each row.

    Args:
        logits: float32 [rows, vocab], for the ranking.
        scaled_logits: of the same rows; min_p is applied here, not before.
        num: candidates a row; what isn't among them is lost (see `Candidates.is_complete`).
        mass: float64 [rows], the weight of all tokens that top_p is a share of; None when the candidates
            hold everything that min_p and top_k keep.
    """
    ids = best_ids(logits, num)
    chosen = scaled_logits.gather(1, ids)
    kept = chosen >= params.log_min_p.float()[:, None]
    ranks = torch.arange(num, device=logits.device)
    top_k = params.top_k[:, None]
    kept &= (ranks < top_k) | (top_k == 0)
    kept[:, 0] = True
    weights = chosen.double().exp_() * kept
    through = weights.cumsum(1)
    total = through[:, -1:] if mass is None else mass[:, None]
    kept &= through - weights < params.top_p[:, None] * total
    kept[:, 0] = True
    return Candidates(ids, weights * kept, kept)


def survivors(scaled_logits: Tensor, params: RowParams) -> Tensor:
    """float64 [rows]: the weight of all tokens that min_p keeps."""
    return mask_min_p(scaled_logits, params).double().exp_().sum(1)


def filtered(logits: Tensor, params: RowParams, *, is_ranked: bool) -> Tensor:
    """Scaled logits [rows, vocab] with -inf where a filter drops the token: their softmax is what is drawn from."""
    result, _ = scaled(logits, params.temperature)
    if not is_ranked:
        return mask_min_p(result, params)
    found = candidates(logits, result, params, num=logits.shape[1], mass=None)
    kept = torch.zeros_like(found.kept).scatter_(1, found.ids, found.kept)
    return result.masked_fill(~kept, -math.inf)
