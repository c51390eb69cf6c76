"""The most likely token of each row, from logits of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["row_argmax"]


def row_argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest value, the first one of equals; of a NaN where there is one.

    Args:
        logits: [rows, vocab], rows contiguous.

    Returns:
        [rows] int64
    """
    if not logits.is_cuda:
        return row_argmax_twin(logits)
    from headrace.kernels._triton_argmax import launch_argmax

    return launch_argmax(logits)


def row_argmax_twin(logits: Tensor) -> Tensor:
    """The plain torch form of `row_argmax`."""
    return torch.argmax(logits, dim=1)
