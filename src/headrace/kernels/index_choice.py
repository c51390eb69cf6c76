"""The tokens that each query attends to, chosen by a small indexer (DeepSeek Sparse Attention, DeepSeek-AI 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

__all__ = ["index_choice"]


def index_choice(q: Tensor, weights: Tensor, keys: Tensor, step: PackedRows, *, top: int, scale: float) -> Tensor:
    """The positions with the highest scores, among those that a query sees causally.

    A position's score is the sum over index heads of weight * relu(scale * q . key). A row of at most `top` cached
    tokens sees all of them.

    Args:
        q: [tokens, index heads, dim], rope applied.
        weights: [tokens, index heads] float32.
        keys: [num_blocks, block_size, dim], this step's already written.

    Returns:
        [tokens, top] int64 in no order; where there are fewer, -1 behind them.
    """
    out = torch.full((q.shape[0], top), -1, dtype=torch.int64, device=q.device)
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or kv_len <= 0:
            continue
        at = torch.arange(kv_len, device=q.device)
        seen = at <= step.positions[begin:end, None]  # [queries, kv]
        if kv_len <= top:
            out[begin:end, :kv_len] = at.where(seen, -1)
            continue
        blocks = step.block_tables[row, : -(-kv_len // step.block_size)].long()
        context = keys[blocks].flatten(0, 1)[:kv_len]
        known = (context.float() if context.dtype == FP8 else context).float()
        hits = (torch.einsum("qhd,kd->qhk", q[begin:end].float(), known) * scale).relu()
        scores = torch.einsum("qhk,qh->qk", hits, weights[begin:end]).masked_fill(~seen, float("-inf"))
        best = scores.topk(top, -1)
        out[begin:end] = best.indices.where(best.values > float("-inf"), -1)
    return out
