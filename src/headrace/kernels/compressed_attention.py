"""Causal attention of packed rows over a window of tokens and compressed entries before it (DeepSeek-V4, 2026)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.pool_windows import gather_entries
from headrace.kernels.port import PackedRows

__all__ = ["compressed_attention"]


def entry_choice(
    q: Tensor, weights: Tensor, cache: Tensor, step: PackedRows, *, every: int, top: int, scale: float
) -> Tensor:
    """The entries with the highest scores, among those that are complete before or with a query's token.

    An entry's score is the sum over index heads of weight * relu(scale * q . key).

    Args:
        q: [tokens, index heads, dim], rope applied.
        weights: [tokens, index heads] float32.
        cache: [num_blocks, entries, dim], this step's already written.

    Returns:
        [tokens, top] int64 in no order, -1 where there are fewer.
    """
    out = torch.full((q.shape[0], top), -1, dtype=torch.int64, device=q.device)
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end, count = starts[row], starts[row + 1], kv_len // every
        if begin == end or count <= 0:
            continue
        seen = torch.arange(count, device=q.device) < (step.positions[begin:end, None] + 1) // every
        keys = gather_entries(cache, step, row, count, every=every)
        hits = (torch.einsum("qhd,kd->qhk", q[begin:end].float(), keys) * scale).relu()
        scores = torch.einsum("qhk,qh->qk", hits, weights[begin:end]).masked_fill(~seen, float("-inf"))
        best = scores.topk(min(top, count), -1)
        out[begin:end, : best.indices.shape[1]] = best.indices.where(best.values > float("-inf"), -1)
    return out


def compressed_attention(
    q: Tensor,
    keys: Tensor,
    step: PackedRows,
    *,
    scale: float,
    sinks: Tensor | None,
    window: int | None,
    entries: Tensor | None = None,
    entry_step: PackedRows | None = None,
    every: int = 1,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend each query over its window and the entries that are complete, in one softmax; keys are the values.

    Args:
        q: [tokens, heads, dim], rope applied.
        keys: [num_blocks, block_size, dim], this step's already written.
        sinks: [heads] logits that take part in the softmax's sum only.
        entries: [num_blocks, entries, dim], this step's already written; None: there are none.
        entry_step: with the block tables of the entries.
        chosen: [tokens, top] int64, the only entries that a query may see, -1 for none; None is all.

    Returns:
        [tokens, heads, dim] in q's dtype.
    """
    out = torch.zeros_like(q)
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or kv_len <= 0:
            continue
        positions = step.positions[begin:end, None]
        first = 0 if window is None else max(0, kv_len - (end - begin) - window + 1)
        at = torch.arange(first, kv_len, device=q.device)
        seen = at <= positions
        if window is not None:
            seen &= at > positions - window
        context = keys[step.block_tables[row, at // step.block_size].long(), at % step.block_size].float()
        count = 0 if entries is None else kv_len // every
        if entries is not None and count:
            assert entry_step is not None
            context = torch.cat((context, gather_entries(entries, entry_step, row, count, every=every)))
            complete = torch.arange(count, device=q.device) < (positions + 1) // every
            seen = torch.cat((seen, complete & _among(None if chosen is None else chosen[begin:end], count)), 1)
        scores = torch.einsum("qhd,kd->hqk", q[begin:end].float(), context) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            logits = sinks.float()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, logits), -1)
        weights = F.softmax(scores, -1)[..., : context.shape[0]]
        out[begin:end] = torch.einsum("hqk,kd->qhd", weights, context).to(q.dtype)
    return out


def _among(chosen: Tensor | None, count: int) -> Tensor | bool:
    """int64 [queries, top], -1 for none -> bool [queries, count]"""
    if chosen is None:
        return True
    marks = torch.zeros(len(chosen), count + 1, dtype=torch.bool, device=chosen.device)
    return marks.scatter_(1, chosen.masked_fill(chosen < 0, count), True)[:, :count]
