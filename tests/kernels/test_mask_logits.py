"""Masks of packed bits: Triton and the table of bytes against bit by bit."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.mask_logits import mask_logits, mask_logits_twin
from tests.kits.interpreter import DEVICES


def launch(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor, device: str) -> torch.Tensor:
    from headrace.kernels._triton_mask import launch_mask

    on_device = logits.to(device, copy=True)
    launch_mask(on_device, rows.to(device), bits.to(device))
    return on_device.cpu()


def bit_by_bit(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    expected = logits.clone()
    for at, row in enumerate(rows.tolist()):
        words = bits[at].tolist()
        for token in range(logits.shape[1]):
            if token // 32 >= len(words) or not words[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    return expected


def case(num_rows: int, vocab: int, words: int, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((num_rows, vocab), generator=generator)
    bits = torch.randint(-(2**31), 2**31 - 1, (len(chosen), words), generator=generator, dtype=torch.int32)
    return logits, torch.tensor(chosen, dtype=torch.int64), bits


CASES = [
    case(3, 100, 4, [0, 2]),
    case(2, 5000, 157, [1]),
    case(1, 64, 2, [0]),
    case(2, 70, 2, [1, 0]),
    case(2, 9, 1, []),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_triton_equals_bit_by_bit(device: str, dtype: torch.dtype, index: int) -> None:
    logits, rows, bits = CASES[index]
    assert torch.equal(launch(logits.to(dtype), rows, bits, device), bit_by_bit(logits.to(dtype), rows, bits))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_cpu_form_equals_bit_by_bit(index: int) -> None:
    logits, rows, bits = CASES[index]
    found, twin = logits.clone(), logits.clone()
    mask_logits(found, rows, bits)
    mask_logits_twin(twin, rows, bits)
    assert torch.equal(found, bit_by_bit(logits, rows, bits)) and torch.equal(twin, found)
