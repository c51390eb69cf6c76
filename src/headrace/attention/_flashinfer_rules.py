"""From how long a prompt on FlashInfer's kernels are the faster ones: what `attn_backend: AUTO` chooses by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.attention.port import AttentionSpec
from headrace.kernels.quantise import FP8


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of layer on one kind of GPU, of those that see all tokens and cap no score."""

    capability: tuple[int, int]
    """Of the GPU, as CUDA numbers it."""
    head_dim: int
    is_kv_fp8: bool
    min_query: int
    """Tokens of the step's longest prompt from which on FlashInfer was the faster one."""


RULES: tuple[Rule, ...] = (Rule((9, 0), 128, is_kv_fp8=False, min_query=6144),)
"""As `benchmarks/gpu_kernels.py --only flashinfer` measured them, at 8,192 tokens (docs/performance.md). What no rule
is about goes to Triton."""


def min_query(
    rules: Sequence[Rule], spec: AttentionSpec, *, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> int | None:
    """Tokens of the longest prompt from which on a layer's prompts go to FlashInfer; None is never."""
    is_plain = spec.window is None and spec.soft_cap is None
    for rule in rules if is_plain else ():
        if (rule.capability, rule.head_dim, rule.is_kv_fp8) == (capability, spec.head_dim, kv_dtype == FP8):
            return rule.min_query
    return None
