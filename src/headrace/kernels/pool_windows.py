"""Compressing a sequence (DeepSeek-V4, DeepSeek-AI 2026): every few tokens their vectors become one.

An entry is a mean of its tokens' vectors, weighted feature by feature with the softmax of their gates. With an overlap
the tokens of the window before take part too, with vectors and gates of their own: each token then has two of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.port import PackedRows

__all__ = ["pool_windows"]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """How tokens are compressed."""

    dim: int
    """Features of an entry."""
    every: int
    """Tokens that it stands for; it is there once the last of them is."""
    overlaps: bool
    """Whether the tokens of the window before take part as well."""

    @property
    def width(self) -> int:
        """Features that a token's vectors have together: first those for the next window, then for its own."""
        return self.dim * (2 if self.overlaps else 1)

    @property
    def reach(self) -> int:
        """Tokens that an entry is made of."""
        return self.every * (2 if self.overlaps else 1)


def closing_tokens(positions: Tensor, every: int, *, num_rows: int) -> tuple[Tensor, Tensor]:
    """Packed tokens that complete a window, as many as there may be: ([most] int64, [most] bool whether it is one).

    Their number is not asked for, so that steps can be captured.
    """
    count = len(positions)
    places = torch.arange(count, device=positions.device).where((positions + 1) % every == 0, count)
    found = places.sort().values[: min(count, count // every + num_rows)]  # a row of n completes n / every, rounded up
    return found.clamp(max=count - 1), found < count


def pool_windows(
    values: Tensor, gates: Tensor, step: PackedRows, tokens: Tensor, *, bias: Tensor, spec: PoolSpec
) -> Tensor:
    """The entries that these tokens complete.

    Args:
        values, gates: [num_blocks, block_size, width], this step's already written.
        tokens: [closed] int64, of `closing_tokens`; of those that complete none the entries mean nothing.
        bias: [every, width], added to the gates by place in the window.

    Returns:
        [closed, dim] float32
    """
    span, size = spec.reach, step.block_size
    rows = row_of(step, tokens)
    at = step.positions[tokens, None] - torch.arange(span - 1, -1, -1, device=tokens.device)  # [closed, span]
    known = (at >= 0)[..., None]  # the first window has none before it
    at = at.clamp(min=0)
    blocks = step.block_tables[rows].long().gather(1, at // size)
    value, gate = (cache[blocks, at % size].float() for cache in (values, gates))  # [closed, span, width]
    gate = gate + bias.repeat(span // spec.every, 1)
    if spec.overlaps:
        value, gate = (_own_halves(part, spec) for part in (value, gate))
    weights = gate.masked_fill(~known, float("-inf")).softmax(1)
    return (value.masked_fill(~known, 0.0) * weights).sum(1)


def _own_halves(part: Tensor, spec: PoolSpec) -> Tensor:
    """[closed, 2 * every, 2 * dim] -> [closed, 2 * every, dim]: what the earlier window has for the next, and so on"""
    return torch.cat((part[:, : spec.every, : spec.dim], part[:, spec.every :, spec.dim :]), 1)


def row_of(step: PackedRows, tokens: Tensor) -> Tensor:
    """The rows that packed tokens are of; of those behind the last row, that one. int64"""
    found = torch.searchsorted(step.query_starts[1:].long(), tokens, right=True)
    return found.clamp(max=step.kv_lens.shape[0] - 1)


def entry_slots(step: PackedRows, tokens: Tensor, *, every: int, entries: int) -> tuple[Tensor, Tensor]:
    """(blocks, entries in them) where the entries that these tokens complete are kept; `entries` a block."""
    at = step.positions[tokens]
    blocks = step.block_tables[row_of(step, tokens)].long().gather(1, at[:, None] // step.block_size)[:, 0]
    inside = (at % step.block_size) // every
    assert entries == -(-step.block_size // every)
    return blocks, inside


def gather_entries(cache: Tensor, step: PackedRows, row: int, count: int, *, every: int) -> Tensor:
    """The first `count` entries of a row. cache: [num_blocks, entries, dim] -> [count, dim] float32"""
    last = torch.arange(1, count + 1, device=cache.device) * every - 1
    blocks = step.block_tables[row, last // step.block_size].long()
    return cache[blocks, (last % step.block_size) // every].float()
