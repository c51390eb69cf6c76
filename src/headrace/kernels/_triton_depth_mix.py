"""The Triton form of `depth_mix`: a program a token, each place read once (online softmax)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor


@triton.jit
def _depth_mix_kernel(
    depths,
    added,
    weight,
    out,
    eps,
    features,
    token_stride,
    place_stride,
    added_stride,
    COUNT: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    REPLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_predecessor(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < features
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    at = depths + token * token_stride + columns
    mixed = tl.zeros((BLOCK,), tl.float32)
    total, highest = 0.0, float("-inf")
    for place in tl.static_range(COUNT):
        value = tl.load(at + place * place_stride, mask=mask, other=0.0).to(tl.float32)
        if HAS_ADDED and place == 0:
            owed = tl.load(added + token * added_stride + columns, mask=mask, other=0.0).to(tl.float32)
            value = owed if REPLACES else value + owed
            rounded = value.to(depths.dtype.element_ty)
            tl.store(at, rounded, mask=mask)
            value = rounded.to(tl.float32)
        score = tl.sum(value * scale, 0) * tl.rsqrt(tl.sum(value * value, 0) / features + eps)
        higher = tl.maximum(highest, score)
        kept, share = tl.exp(highest - higher), tl.exp(score - higher)
        mixed = mixed * kept + value * share
        total, highest = total * kept + share, higher
    tl.store(out + token * features + columns, (mixed / total).to(out.dtype.element_ty), mask=mask)


def launch_depth_mix(
    depths: Tensor, weight: Tensor, eps: float, *, count: int, added: Tensor | None, replaces: bool
) -> Tensor:
    """The contract of `depth_mix`."""
    num_tokens, _, features = depths.shape
    assert depths.stride(2) == 1 and weight.is_contiguous() and weight.dtype == torch.float32
    assert added is None or (added.stride(1) == 1 and added.dtype == depths.dtype and added.shape == out_shape(depths))
    out = torch.empty((num_tokens, features), dtype=depths.dtype, device=depths.device)
    if num_tokens:
        block = power_of_2(features)
        grid(_depth_mix_kernel, num_tokens)(
            depths,
            depths if added is None else added,
            weight,
            out,
            eps,
            features,
            *depths.stride()[:2],
            0 if added is None else added.stride(0),
            COUNT=count,
            HAS_ADDED=added is not None,
            REPLACES=replaces,
            BLOCK=block,
            **chain_options(depths, 16 if block >= 8192 else 8 if block >= 2048 else 4),
        )
    return out


def out_shape(depths: Tensor) -> tuple[int, int]:
    return (depths.shape[0], depths.shape[2])
