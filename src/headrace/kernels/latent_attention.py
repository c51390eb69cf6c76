"""Multi-head latent attention (DeepSeek-AI 2024) over a paged cache of latents.

The cache holds one vector a token: the latent, of which keys and values are linear functions, and the part of the key
that rope turned. With the functions absorbed into the query and the output, attending is multi-query attention whose
only head has the whole vector as its key and the latent as its value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8, to_fp8

__all__ = ["latent_attention"]

MAX_GATHER_ELEMENTS = 1 << 24
"""Of cached vectors that a batch of rows holds beside the cache."""


def latent_write(vectors: Tensor, cache: Tensor, write_slots: Tensor, *, scale: float = 1.0) -> None:
    """Write this step's vectors.

    Args:
        vectors: [tokens, dim].
        cache: [num_blocks, block_size, dim]; FP8 entries are divided by `scale`, saturated.
        write_slots: [tokens] int64, block * block_size + offset; several may share a slot of the dummy block 0.
    """
    stored = to_fp8(vectors.float() / scale) if cache.dtype == FP8 else vectors.to(cache.dtype)
    size = cache.shape[1]
    cache.index_put_((write_slots // size, write_slots % size), stored)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    rank: int,
    scale: float,
    window: int | None = None,
    sink_tokens: int = 0,
    cache_scale: float = 1.0,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend each query over the cached tokens of its row, its own included, causally.

    Args:
        q: [tokens, heads, dim], keys' function absorbed and rope applied.
        cache: [num_blocks, block_size, dim], this step's tokens already written.
        rank: leading features that are the value.
        scale: of the scores.
        window: tokens a query sees, itself included, beside the first `sink_tokens`; None is everything.
        cache_scale: FP8 entries are times this.
        chosen: [tokens, k] int64, the only positions that a query may see, -1 for none; None is all.

    Returns:
        [tokens, heads, rank] in q's dtype.
    """
    out = q.new_zeros(*q.shape[:2], rank)
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or kv_len <= 0:
            continue
        seen = _seen(step.positions[begin:end], kv_len, window=window, sink_tokens=sink_tokens)
        if chosen is not None:
            seen &= _among(chosen[begin:end], kv_len)
        keys = _gathered(cache, step, row, seen.any(0))
        if cache.dtype == FP8:
            keys = keys * cache_scale
        keys = keys.masked_fill(~seen.any(0)[:, None], 0.0)  # what nobody sees may hold anything
        scores = torch.einsum("qhd,kd->hqk", q[begin:end].float(), keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        out[begin:end] = torch.einsum("hqk,kr->qhr", weights, keys[:, :rank]).to(q.dtype)
    return out


def latent_decode(
    q: Tensor,
    cache: Tensor,
    step: PackedRows,
    *,
    rank: int,
    scale: float,
    window: int | None = None,
    sink_tokens: int = 0,
    cache_scale: float = 1.0,
    chosen: Tensor | None = None,
) -> Tensor:
    """As `latent_attention`, for rows of one token each, some of them at a time.

    Args:
        q: [rows, heads, dim].
    """
    out = q.new_zeros(*q.shape[:2], rank)
    longest = int(step.kv_lens.max())
    width = longest if chosen is None else chosen.shape[1]
    count = max(1, MAX_GATHER_ELEMENTS // max(1, width * cache.shape[2]))
    for first in range(0, len(q), count):
        rows = slice(first, min(first + count, len(q)))
        positions, kv_lens = step.positions[rows, None], step.kv_lens[rows, None]
        at = torch.arange(longest, device=q.device)[None] if chosen is None else chosen[rows]
        seen = (at >= 0) & (at <= positions) & (at < kv_lens)  # [rows, kv]
        if window is not None:
            seen &= (at > positions - window) | (at < sink_tokens)
        at = at.where(seen, 0)
        blocks = step.block_tables[rows].long().gather(1, at // step.block_size).where(seen, 0)
        keys = cache[blocks, at % step.block_size].float()  # [rows, kv, dim]
        if cache.dtype == FP8:
            keys = keys * cache_scale
        keys = keys.masked_fill(~seen[..., None], 0.0)
        scores = (q[rows].float() @ keys.transpose(1, 2) * scale).masked_fill(~seen[:, None], float("-inf"))
        out[rows] = (scores.softmax(-1).nan_to_num(0.0) @ keys[..., :rank]).to(q.dtype)
    return out


def _gathered(cache: Tensor, step: PackedRows, row: int, wanted: Tensor) -> Tensor:
    """wanted: bool [kv]; blocks without such tokens may be gone. -> [kv, dim] float32"""
    kv_len, size = len(wanted), step.block_size
    num_blocks = -(-kv_len // size)
    inside = torch.nn.functional.pad(wanted, (0, num_blocks * size - kv_len)).view(num_blocks, size).any(1)
    blocks = step.block_tables[row, :num_blocks].long().where(inside, 0)
    return cache[blocks].flatten(0, 1)[:kv_len].float()


def _seen(positions: Tensor, kv_len: int, *, window: int | None, sink_tokens: int) -> Tensor:
    """bool [queries, kv]"""
    at = torch.arange(kv_len, device=positions.device)
    seen = at <= positions[:, None]
    if window is not None:
        seen &= (at > positions[:, None] - window) | (at < sink_tokens)
    return seen


def _among(chosen: Tensor, kv_len: int) -> Tensor:
    """int64 [queries, k], -1 for none -> bool [queries, kv]"""
    marks = torch.zeros(len(chosen), kv_len + 1, dtype=torch.bool, device=chosen.device)
    return marks.scatter_(1, chosen.masked_fill(chosen < 0, kv_len), True)[:, :kv_len]
