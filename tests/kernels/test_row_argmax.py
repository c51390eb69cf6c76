"""The argmax of rows: Triton against the torch twin."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.row_argmax import row_argmax, row_argmax_twin
from tests.kits.interpreter import DEVICES


def launch(logits: torch.Tensor, device: str) -> list[int]:
    from headrace.kernels._triton_argmax import launch_argmax

    return launch_argmax(logits.to(device)).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 5000), (3, 2048), (40, 77), (1, 1), (0, 9)])
def test_equals_torch(device: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(rows)).to(dtype)
    assert launch(logits, device) == row_argmax_twin(logits).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device: str) -> None:
    """Equal values far apart, infinities, banned rows, zeros of both signs, NaN."""
    logits = torch.full((6, 5000), -1.0)
    logits[0, [4999, 17, 3000]] = 2.0
    logits[1] = -torch.inf
    logits[2, 4100] = torch.inf
    logits[3] = -torch.inf
    logits[3, 33] = -3e38
    logits[4, 1000], logits[4, 2000] = -0.0, 0.0
    logits[5, 2222] = torch.nan
    logits[5, 4] = torch.inf
    found = launch(logits, device)
    assert found == [17, 0, 4100, 33, 1000, 2222]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_a_view(device: str) -> None:
    wide = torch.randn((4, 300), generator=torch.Generator().manual_seed(1)).to(device)
    part = wide[:, :250]
    from headrace.kernels._triton_argmax import launch_argmax

    assert launch_argmax(part).tolist() == part.argmax(1).tolist()


def test_the_cpu_form() -> None:
    assert row_argmax(torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 1.0]])).tolist() == [1, 0]
