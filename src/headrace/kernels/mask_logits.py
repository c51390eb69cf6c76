"""Logits of tokens that a grammar rules out become minus infinity, for all rows at once, from packed bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["mask_logits"]


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Mask some rows in place.

    Args:
        logits: [rows, vocab], of any float dtype, rows contiguous.
        rows: [n] int64, each row once.
        bits: [n, words] int32, a set bit is a token that may come, the lowest first. Ids past the words may not.
    """
    if not logits.is_cuda:
        mask_logits_twin(logits, rows, bits)
        return
    from headrace.kernels._triton_mask import launch_mask

    launch_mask(logits, rows, bits)


def mask_logits_twin(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """The plain torch form of `mask_logits`."""
    vocab = logits.shape[1]
    allowed = _table(bits.device)[bits.contiguous().view(torch.uint8).long()].flatten(1)[:, :vocab]
    if allowed.shape[1] < vocab:
        allowed = torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[1]))
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


@functools.cache
def _table(device: torch.device) -> Tensor:
    """The bits of every byte, the lowest first. [256, 8] bool"""
    values = torch.arange(256, device=device)[:, None]
    return (values >> torch.arange(8, device=device)) & 1 != 0
