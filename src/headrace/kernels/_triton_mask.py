"""Masking of logits by packed bits, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid

TILE = 4096


@triton.jit
def _mask_kernel(logits, rows, bits, logits_stride, bits_stride, vocab, num_words, TILE: tl.constexpr):
    """Programs: (tiles of the vocabulary, masked rows). Only what is ruled out is written."""
    at, n = tl.program_id(0), tl.program_id(1)
    index = at * TILE + tl.arange(0, TILE)
    word = index // 32
    packed = tl.load(bits + n * bits_stride + word, mask=word < num_words, other=0)
    is_out = ((packed >> (index % 32)) & 1) == 0
    row = tl.load(rows + n)
    tl.store(logits + row * logits_stride + index, float("-inf"), mask=is_out & (index < vocab))


def launch_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    assert logits.stride(1) == 1 and bits.stride(1) == 1
    if not len(rows):
        return
    vocab = logits.shape[1]
    grid(_mask_kernel, triton.cdiv(vocab, TILE), len(rows))(
        logits, rows, bits, logits.stride(0), bits.stride(0), vocab, bits.shape[1], TILE=TILE, num_warps=8
    )
