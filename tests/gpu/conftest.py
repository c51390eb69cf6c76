"""What tests of whole models on a GPU have in common."""

from __future__ import annotations

import pytest
import torch

GPU_TOLERANCE = 2.5e-4
"""Of logits in float32. Sums have another order than the oracle's on the host: on an H200 two of 50 models differ by
more than 1e-4, by 1.8e-4 at most, with our kernels and with PyTorch's alike."""


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in float32, without TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr("tests.kits.model.TOLERANCE", GPU_TOLERANCE)
