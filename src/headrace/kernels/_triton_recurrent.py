"""Short convolutions of recurrent layers in Triton: a tile of a row's tokens and of channels at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid
from headrace.kernels.port import StateRows

CONV_TOKENS, CONV_CHANNELS = 16, 128


@triton.jit
def _conv_kernel(
    x, weight, bias, before, state, out, slots, query_starts,
    first_row, channels, x_stride, before_stride, state_stride,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATHERED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of a row's tokens, rows, tiles of channels). `before`: the old states, by row or by slot."""
    tile, row = tl.program_id(0), tl.program_id(1) + first_row
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    start = tl.load(query_starts + row).to(tl.int64)
    length = tl.load(query_starts + row + 1).to(tl.int64) - start
    if tile * TOKENS < length:
        slot = tl.load(slots + row)
        held = before + (row.to(tl.int64) if IS_GATHERED else slot) * before_stride
        is_channel = channel < channels
        at = tile * TOKENS + tl.arange(0, TOKENS)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(KERNEL):
            seen = at + tap - (KERNEL - 1)
            mask = (at < length)[:, None] & is_channel[None, :]
            new = tl.load(
                x + (start + seen)[:, None] * x_stride + channel[None, :], mask=mask & (seen >= 0)[:, None], other=0.0
            )
            old = tl.load(
                held + channel[None, :] * (KERNEL - 1) + (seen + KERNEL - 1)[:, None],
                mask=mask & (seen < 0)[:, None],
                other=0.0,
            )
            factor = tl.load(weight + channel * KERNEL + tap, mask=is_channel, other=0.0).to(tl.float32)
            total += (new.to(tl.float32) + old.to(tl.float32)) * factor[None, :]
        total = total / (1.0 + tl.exp(-total))
        tl.store(
            out + (start + at)[:, None] * channels + channel[None, :],
            total.to(out.dtype.element_ty),
            mask=(at < length)[:, None] & is_channel[None, :],
        )
        if tile * TOKENS + TOKENS >= length:  # the row's last tile writes its state, from left to right
            kept = state + slot * state_stride
            for place in tl.static_range(KERNEL - 1):
                source = length - (KERNEL - 1) + place
                is_new = tl.where(source >= 0, is_channel, False)
                is_old = tl.where(source >= 0, False, is_channel)
                mine = tl.load(x + (start + source) * x_stride + channel, mask=is_new, other=0.0)
                olds = tl.load(held + channel * (KERNEL - 1) + place + length, mask=is_old, other=0.0)
                value = mine.to(tl.float32) + olds.to(tl.float32)
                tl.store(kept + channel * (KERNEL - 1) + place, value.to(state.dtype.element_ty), mask=is_channel)


def launch_short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: StateRows) -> Tensor:
    """As `short_conv`."""
    num_tokens, channels = x.shape
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    assert x.stride(1) == 1 and weight.is_contiguous() and state[0].is_contiguous()
    options = {"KERNEL": weight.shape[1], "HAS_BIAS": bias is not None, "CHANNELS": CONV_CHANNELS, "num_warps": 4}
    tensors = (x, weight, weight if bias is None else bias)
    places, sizes = (state, out, step.slots, step.query_starts), (channels, x.stride(0))
    num_context, parts = step.num_context_rows, -(-channels // CONV_CHANNELS)
    if num_context:  # a row of several tiles reads its old state while it writes the new one: from a copy
        before = state.index_select(0, step.slots[:num_context])
        longest = max(end - start for start, end in zip(step.context_starts, step.context_starts[1:]))
        grid(_conv_kernel, -(-longest // CONV_TOKENS), num_context, parts)(
            *tensors, before, *places, 0, *sizes, before.stride(0), state.stride(0),
            IS_GATHERED=True, TOKENS=CONV_TOKENS, **options,
        )  # fmt: skip
    if num_context < len(step.slots):
        grid(_conv_kernel, 1, len(step.slots) - num_context, parts)(
            *tensors, state, *places, num_context, *sizes, state.stride(0), state.stride(0),
            IS_GATHERED=False, TOKENS=1, **options,
        )  # fmt: skip
    return out
