"""Causal attention of packed rows over chosen blocks of a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.port import HeadsSpec, PackedRows
from headrace.kernels.quantise import FP8

__all__ = ["sparse_attention"]


def sparse_attention(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, step: PackedRows, spec: HeadsSpec, *, chosen: Tensor, block: int
) -> Tensor:
    """As `paged_attention`, but that the queries of a KV head see its chosen blocks of `block` tokens only.

    Args:
        q: [tokens, heads, dim], rope applied.
        cache_k, cache_v: [num_blocks, kv_heads, block_size, dim], this step's tokens already written.
        chosen: [tokens, kv_heads, top] int64, -1 for none.
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // cache_k.shape[1]
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or kv_len <= 0:
            continue
        pages = step.block_tables[row, : -(-kv_len // step.block_size)].long()
        keys, values = (
            cache[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len].float() * (scale if cache.dtype == FP8 else 1.0)
            for cache, scale in ((cache_k, spec.k_scale), (cache_v, spec.v_scale))
        )
        at = torch.arange(kv_len, device=q.device)
        num_blocks = -(-kv_len // block)
        places = chosen[begin:end].masked_fill(chosen[begin:end] < 0, num_blocks)
        marks = torch.zeros(*places.shape[:2], num_blocks + 1, dtype=torch.bool, device=q.device)
        seen = marks.scatter_(2, places, True)[..., at // block] & (at <= step.positions[begin:end, None, None])
        seen = seen.transpose(0, 1)[:, None]  # [kv_heads, 1, queries, kv]
        heads = q[begin:end].float().unflatten(1, (-1, group))  # [queries, kv_heads, group, dim]
        scores = torch.einsum("qngd,nkd->ngqk", heads, keys) * spec.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[begin:end] = torch.einsum("ngqk,nkd->qngd", weights, values).flatten(1, 2).to(q.dtype)
    return out
