"""Causal attention of packed rows over a paged cache."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from headrace.kernels._native import dtype_flag, library, num_threads
from headrace.kernels.port import HeadsSpec, PackedRows
from headrace.kernels.quantise import FP8

__all__ = ["paged_attention"]


def paged_attention(q: Tensor, cache_k: Tensor, cache_v: Tensor, step: PackedRows, spec: HeadsSpec) -> Tensor:
    """Attend each query over the cached tokens of its row, its own included.

    A query at position p sees the cached tokens j <= p of its row, with a window w only those j > p - w and the
    first `sink_tokens` (Xiao et al. 2024); where the window is chunked only those of its own chunk, j >= p - p mod w.
    Head h reads KV head h // (heads / kv_heads). Cache entries that no query
    sees are never read into the result, so they may hold anything, NaN included.

    Args:
        q: [tokens, heads, dim], rope applied.
        cache_k, cache_v: [num_blocks, kv_heads, block_size, dim], this step's tokens already written; FP8 entries are
            times `spec.k_scale` and `spec.v_scale`.

    Returns:
        [tokens, heads, dim] in q's dtype. A softmax without a visible token is zero.
    """
    native = library() if q.is_cpu else None
    if native is None or not _is_plain(q, cache_k, cache_v):
        return paged_attention_twin(q, cache_k, cache_v, step, spec)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache_k.shape[1]
    assert num_heads % num_kv_heads == 0 and cache_k.shape[2] == step.block_size
    assert step.block_tables.stride(-1) == 1 and step.positions.is_contiguous()
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    arguments = _ARGUMENTS.pack(
        q.data_ptr(),
        out.data_ptr(),
        cache_k.data_ptr(),
        cache_v.data_ptr(),
        step.positions.data_ptr(),
        step.query_starts.data_ptr(),
        step.kv_lens.data_ptr(),
        step.block_tables.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        step.kv_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        step.block_size,
        step.block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        cache_k.stride(0),
        cache_k.stride(1),
        cache_v.stride(0),
        cache_v.stride(1),
        -(spec.window or 0) if spec.is_chunked else spec.window or 0,
        spec.sink_tokens if spec.window else 0,
        dtype_flag(q),
        dtype_flag(cache_k),
        num_threads(),
        spec.scale,
        spec.soft_cap or 0.0,
    )
    if native.hr_paged_attention(arguments):
        raise MemoryError("no memory for the attention kernel's scratch: lower max_num_tokens")
    return out


_ARGUMENTS = struct.Struct("=26q2d")
"""struct attention of native/attention.c"""


def _is_plain(q: Tensor, cache_k: Tensor, cache_v: Tensor) -> bool:
    """Whether the compiled kernel can read these: known types, and a head's tokens of a block one after another."""
    if dtype_flag(q) is None or dtype_flag(cache_k) is None or q.stride(-1) != 1 or cache_v.dtype != cache_k.dtype:
        return False
    return cache_k.stride()[2:] == cache_v.stride()[2:] == (q.shape[-1], 1)


def paged_attention_twin(q: Tensor, cache_k: Tensor, cache_v: Tensor, step: PackedRows, spec: HeadsSpec) -> Tensor:
    """The plain torch form of `paged_attention`: a row at a time, its context gathered, softmax in float32."""
    out = torch.zeros_like(q)
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin < end and kv_len > 0:
            context = _RowContext(cache_k, cache_v, step, row=row, kv_len=kv_len)
            out[begin:end] = _attend_row(q[begin:end], step.positions[begin:end], context, spec)
    return out


class _RowContext:
    """K and V of one row's visible blocks."""

    def __init__(self, cache_k: Tensor, cache_v: Tensor, step: PackedRows, *, row: int, kv_len: int) -> None:
        self.cache_k, self.cache_v = cache_k, cache_v
        self.table = step.block_tables[row].long()
        self.block_size = step.block_size
        self.kv_len = kv_len

    def gather(self, cache: Tensor, places: Tensor) -> Tensor:
        """The blocks at these places of the table. -> [kv_heads, tokens, dim] float32"""
        blocks = cache[self.table[places]]  # [blocks, kv_heads, block_size, dim]
        return blocks.transpose(0, 1).flatten(1, 2).float()


def _attend_row(q: Tensor, positions: Tensor, context: _RowContext, spec: HeadsSpec) -> Tensor:
    last = min(int(positions.max()), context.kv_len - 1)
    first = 0 if spec.window is None else int(_first_seen(positions.min(), spec.window, is_chunked=spec.is_chunked))
    size = context.block_size
    end_block, num_sink_blocks = last // size + 1, -(-spec.sink_tokens // size)
    places = [place for place in range(end_block) if place >= first // size or place < num_sink_blocks]
    if not places:
        return torch.zeros_like(q)
    visible = torch.tensor(places, device=q.device)
    keys, values = context.gather(context.cache_k, visible), context.gather(context.cache_v, visible)
    if context.cache_k.dtype == FP8:
        keys, values = keys * spec.k_scale, values * spec.v_scale
    at = (visible[:, None] * size + torch.arange(size, device=q.device)).flatten()

    seen = (at[None, :] <= positions[:, None]) & (at[None, :] < context.kv_len)  # [queries, kv]
    if spec.window is not None:
        begin = _first_seen(positions, spec.window, is_chunked=spec.is_chunked)
        seen &= (at[None, :] >= begin[:, None]) | (at[None, :] < spec.sink_tokens)
    anyone = seen.any(0)
    keys, values = keys[:, anyone], values[:, anyone]
    return _softmax_attend(q, keys, values, seen[:, anyone], spec)


def _first_seen(positions: Tensor, window: int, *, is_chunked: bool) -> Tensor:
    return positions - positions % window if is_chunked else (positions - window + 1).clamp(min=0)


def _softmax_attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, spec: HeadsSpec) -> Tensor:
    """q: [queries, heads, dim]; keys, values: [kv_heads, kv, dim]; seen: [queries, kv]"""
    group = q.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", q.float(), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if spec.sinks is not None:
        sink = spec.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype)
