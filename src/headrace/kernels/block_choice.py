"""The blocks of tokens that each query attends to, chosen by small index heads (MiniMax Sparse Attention, 2026)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.port import PackedRows
from headrace.kernels.quantise import FP8

__all__ = ["block_choice"]


@dataclass(frozen=True, slots=True)
class BlockIndexSpec:
    """What is chosen. Blocks are of positions in the sequence, whatever blocks the cache has."""

    dim: int
    block: int
    """Tokens of a block."""
    top: int
    """Blocks that a query sees at most, those of `local` and `first` among them."""
    local: int
    """Last blocks that every query sees, its own included."""
    first: int = 0
    """Blocks from the beginning that every query sees."""

    def forced(self, positions: Tensor) -> Tensor:
        """The blocks that queries see whatever their scores are: positions [tokens] -> [tokens, local + first]"""
        own = positions[:, None] // self.block
        local = (own - torch.arange(self.local, device=own.device)).clamp(min=0)
        return torch.cat((local, torch.arange(self.first, device=own.device).minimum(own)), -1)


def block_choice(q: Tensor, keys: Tensor, step: PackedRows, spec: BlockIndexSpec) -> Tensor:
    """The blocks with the highest scores for each index head: a block's is that of its best token that a query sees.

    Args:
        q: [tokens, index heads, dim], rope applied.
        keys: [num_blocks, block_size, dim], this step's already written.

    Returns:
        [tokens, index heads, top] int64, -1 behind them where there are fewer.
    """
    out = torch.full((*q.shape[:2], spec.top), -1, dtype=torch.int64, device=q.device)
    starts = step.query_starts.tolist()
    for row, kv_len in enumerate(step.kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end or kv_len <= 0:
            continue
        pages = step.block_tables[row, : -(-kv_len // step.block_size)].long()
        context = keys[pages].flatten(0, 1)[:kv_len]
        known = (context.float() if context.dtype == FP8 else context).float()
        positions = step.positions[begin:end]
        scores = torch.einsum("qhd,kd->qhk", q[begin:end].float(), known)
        hidden = torch.arange(kv_len, device=q.device) > positions[:, None, None]
        num_blocks = -(-kv_len // spec.block)
        padded = F.pad(scores.masked_fill(hidden, -torch.inf), (0, num_blocks * spec.block - kv_len), value=-torch.inf)
        best = padded.unflatten(-1, (num_blocks, spec.block)).amax(-1)
        best.scatter_(-1, spec.forced(positions)[:, None].expand(-1, q.shape[1], -1), torch.inf)
        found = best.topk(min(spec.top, num_blocks), -1)
        out[begin:end, :, : found.indices.shape[-1]] = found.indices.where(found.values > -torch.inf, -1)
    return out
