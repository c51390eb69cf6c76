"""Between host and device without waiting: one copy down a step, one copy up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.sampling.rows import Upload as Upload


def stage(arrays: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """The arrays as int64 tensors of their shapes on the device, in one copy from pinned memory.

    The tensors are views of one; nobody writes to them.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array.astype(np.int64)) for array in arrays]
    host = torch.empty(sum(array.size for array in arrays), dtype=torch.int64, pin_memory=True)
    packed = host.numpy()
    at = 0
    for array in arrays:
        packed[at : at + array.size] = array.reshape(-1)
        at += array.size
    # The cache of pinned memory hands `host` out again only after this copy.
    parts = host.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays)]
