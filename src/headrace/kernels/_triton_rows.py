"""Triton kernels that work row by row: norm (+ residual) (+ quantise), activation * up (+ quantise), quantise, and the
gate and norm behind a scan.

Each reads its inputs once and rounds where the torch twins round, so that only values at a tie of the last rounding
may differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels.gated_norm import GateActivation, Ranks
from headrace.kernels.quantise import PLAIN, TINY, Form, Quantised

KINDS = {"plain": 0, "static": 1, "token": 2, "group": 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
MAX_BLOCK = 4096
"""Features that one program of an element-wise kernel takes."""
MAX_ROW_BLOCK = 16384
"""Features that a program holds at once when it needs the whole row."""
GROUPS_BLOCK = 1024
"""Features that a program takes of gated groups, or one group. It never depends on the rows: nor do sums, then."""


@triton.jit
def _store_fp8(y, out, scales, scale, start, features, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise float32 features from `start` on of a row. scale: read for KIND 1, that of the row for KIND 2."""
    columns = start + tl.arange(0, BLOCK)
    if KIND == 3:
        grouped = tl.reshape(y, (BLOCK // GROUP, GROUP))
        by_group = tl.maximum(tl.max(tl.abs(grouped), 1) / 448.0, 1e-12)
        y = tl.reshape(grouped / by_group[:, None], (BLOCK,))
        groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + groups, by_group, mask=groups * GROUP < features)
    else:
        y = y / scale
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    tl.store(out + columns, y.to(out.dtype.element_ty), mask=columns < features)


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    scales,
    eps,
    features,
    x_stride,
    residual_stride,
    scales_stride,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < features
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    own = x.dtype.element_ty
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value = value.to(tl.float32) + tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
        value = value.to(own)
        tl.store(summed + row * features + columns, value, mask=mask)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / features + eps)
    if PLUS_ONE:
        normed = (wide * (1.0 + w)).to(own)
    else:
        normed = (w * wide.to(own).to(tl.float32)).to(own)
    if KIND == 0:
        tl.store(out + row * features + columns, normed, mask=mask)
    else:
        y = normed.to(tl.float32)
        scale = 1.0
        if KIND == 1:
            scale = tl.load(scales)
        if KIND == 2:
            scale = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, 1e-12)
            tl.store(scales + row * scales_stride, scale)
        _store_fp8(y, out + row * features, scales + row * scales_stride, scale, 0, features, KIND, GROUP, BLOCK)


def launch_norm(
    x: Tensor, weight: Tensor, eps: float, *, form: Form, residual: Tensor | None = None, plus_one: bool = False
) -> tuple[Quantised, Tensor | None]:
    """The contract of `norm_quantise`."""
    num_rows, features = x.shape
    assert x.stride(-1) == 1 and weight.is_contiguous()
    out = form.new_data(num_rows, features, x.dtype, x.device)
    scales = form.new_scales(num_rows, features, x.device)
    summed = None
    if residual is not None:
        assert residual.dtype == x.dtype and residual.shape == x.shape and residual.stride(-1) == 1
        summed = torch.empty((num_rows, features), dtype=x.dtype, device=x.device)
    if num_rows:
        block = power_of_2(features)
        grid(_norm_kernel, num_rows)(
            x,
            x if residual is None else residual,
            weight,
            out,
            out if summed is None else summed,
            out if scales is None else scales,
            eps,
            features,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            0 if scales is None or form.kind == "static" else scales.shape[1],
            HAS_RESIDUAL=residual is not None,
            PLUS_ONE=plus_one,
            KIND=KINDS[form.kind],
            GROUP=form.group,
            BLOCK=max(block, form.group),
            **chain_options(x, min(8, max(1, block // 512))),
        )
    return Quantised(out, scales), summed


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == 1:
        # (1 + tanh(x)) / 2 is the logistic function of 2 x.
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == 2:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        return tl.maximum(gate, 0.0)


@triton.jit
def _act_mul_kernel(
    x,
    out,
    scales,
    features,
    x_stride,
    scales_stride,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (rows, blocks of features); one block for KIND 2."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    mask = columns < features
    y = _act_mul_block(x + row * x_stride, features, columns, mask, ACTIVATION)
    if KIND == 0:
        tl.store(out + row * features + columns, y, mask=mask)
    else:
        scale = 1.0
        y = y.to(tl.float32)
        if KIND == 1:
            scale = tl.load(scales)
        if KIND == 2:
            scale = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, 1e-12)
            tl.store(scales + row * scales_stride, scale)
        _store_fp8(y, out + row * features, scales + row * scales_stride, scale, start, features, KIND, GROUP, BLOCK)


@triton.jit
def _act_mul_block(x, features, columns, mask, ACTIVATION: tl.constexpr):
    gate = tl.load(x + columns, mask=mask, other=0.0)
    up = tl.load(x + features + columns, mask=mask, other=0.0)
    active = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    return (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _act_mul_token_kernel(
    x, out, scales, features, x_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """For rows too wide for one block. A program a row, twice over its features: then they come from the cache."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = _act_mul_block(x + row * x_stride, features, columns, columns < features, ACTIVATION)
        largest = tl.maximum(largest, tl.abs(y.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0) / 448.0, 1e-12)
    tl.store(scales + row, scale)
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < features
        y = _act_mul_block(x + row * x_stride, features, columns, mask, ACTIVATION).to(tl.float32) / scale
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        tl.store(out + row * features + columns, y.to(out.dtype.element_ty), mask=mask)


def launch_act_mul(x: Tensor, kind: str, *, form: Form) -> Quantised:
    """The contract of `act_mul_quantise`."""
    num_rows, features = x.shape[0], x.shape[1] // 2
    assert x.stride(-1) == 1
    out = form.new_data(num_rows, features, x.dtype, x.device)
    scales = form.new_scales(num_rows, features, x.device)
    if not num_rows:
        return Quantised(out, scales)
    block = min(power_of_2(features), 2048)
    warps = min(8, max(1, block // 256))
    if form.kind == "token" and features > MAX_ROW_BLOCK:
        grid(_act_mul_token_kernel, num_rows)(
            x,
            out,
            scales,
            features,
            x.stride(0),
            ACTIVATION=ACTIVATIONS[kind],
            BLOCK=block,
            **chain_options(x, warps),
        )
        return Quantised(out, scales)
    if form.kind == "token":
        block = power_of_2(features)
        warps = min(16, max(1, block // 512))
    elif form.kind == "group":
        block = max(block, form.group)
    grid(_act_mul_kernel, num_rows, -(-features // block))(
        x,
        out,
        out if scales is None else scales,
        features,
        x.stride(0),
        0 if scales is None or form.kind == "static" else scales.shape[1],
        ACTIVATION=ACTIVATIONS[kind],
        KIND=KINDS[form.kind],
        GROUP=form.group,
        BLOCK=block,
        **chain_options(x, warps),
    )
    return Quantised(out, scales)


@triton.jit
def _quantise_kernel(
    x,
    out,
    scales,
    features,
    x_stride,
    scales_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (rows, blocks of features); one block for KIND 2."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    mask = columns < features
    y = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0
    if KIND == 1:
        scale = tl.load(scales)
    if KIND == 2:
        scale = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, 1e-12)
        tl.store(scales + row * scales_stride, scale)
    _store_fp8(y, out + row * features, scales + row * scales_stride, scale, start, features, KIND, GROUP, BLOCK)


def launch_quantise(x: Tensor, form: Form) -> Quantised:
    """The contract of `quantise`."""
    num_rows, features = x.shape
    assert x.stride(-1) == 1
    out = form.new_data(num_rows, features, x.dtype, x.device)
    scales = form.new_scales(num_rows, features, x.device)
    assert scales is not None, form
    block = power_of_2(features)
    block = block if form.kind == "token" else max(min(block, MAX_BLOCK), form.group if form.kind == "group" else 1)
    if num_rows:
        grid(_quantise_kernel, num_rows, -(-features // block))(
            x,
            out,
            scales,
            features,
            x.stride(0),
            0 if form.kind == "static" else scales.shape[1],
            KIND=KINDS[form.kind],
            GROUP=form.group,
            BLOCK=block,
            **chain_options(x, min(8, max(1, block // 512))),
        )
    return Quantised(out, scales)


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, squares, out, scales, eps, num_rows, groups, dim, count, gate_stride, weight_stride,
    SILU: tl.constexpr, IS_GATED_FIRST: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Programs: blocks of rows, which are the groups of all tokens, one after another.

    NORM: "none", "whole", "sum" (only each row's sum of squares, into `squares`), or "summed" (it comes from there).
    """
    wait_for_predecessor(CHAINED)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    group, place = row % groups, row.to(tl.int64)[:, None] * dim + column[None, :]
    is_row = row < num_rows
    mask = is_row[:, None] & (column < dim)[None, :]
    y = tl.load(x + place, mask=mask, other=0.0)
    at_gate = (row // groups).to(tl.int64) * gate_stride + group * dim
    active = tl.load(gate + at_gate[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if SILU:
        active = activate(active, 0)
    else:
        active = 1.0 / (1.0 + tl.exp(-active))
    if IS_GATED_FIRST:
        y *= active
    if NORM == "sum":
        tl.store(squares + row, tl.sum(y * y, 1), mask=is_row)
        return
    if NORM != "none":
        if NORM == "whole":
            total = tl.sum(y * y, 1)
        else:
            total = tl.load(squares + row, mask=is_row, other=0.0)
        scale = tl.load(weight + (group * weight_stride)[:, None] + column[None, :], mask=mask, other=0.0)
        y = y * tl.rsqrt(total / count + eps)[:, None] * scale.to(tl.float32)
    if not IS_GATED_FIRST:
        y *= active
    y = y.to(gate.dtype.element_ty)
    if KIND == 0:
        tl.store(out + place, y, mask=mask)
    else:
        y = y.to(tl.float32)
        if KIND == 1:
            y = y / tl.load(scales)
        else:
            part = tl.arange(0, BLOCK // GROUP)
            parts = tl.reshape(y, (ROWS, BLOCK // GROUP, GROUP))
            by_part = tl.maximum(tl.max(tl.abs(parts), 2) / 448.0, 1e-12)
            y = tl.reshape(parts / by_part[:, :, None], (ROWS, BLOCK))
            is_part = is_row[:, None] & (part * GROUP < dim)[None, :]
            tl.store(scales + row.to(tl.int64)[:, None] * (dim // GROUP) + part[None, :], by_part, mask=is_part)
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def launch_gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 0.0,
    *,
    act: GateActivation = "silu",
    is_gated_first: bool = False,
    ranks: Ranks | None = None,
    form: Form = PLAIN,
) -> Quantised:
    """The contract of `gated_norm`."""
    num_tokens, groups, dim = x.shape
    if form.kind == "token" or (form.kind == "group" and dim % form.group):
        # Features that share a scale lie in several programs.
        plain = launch_gated_norm(x, gate, weight, eps, act=act, is_gated_first=is_gated_first, ranks=ranks)
        return launch_quantise(plain.data, form)
    assert gate.shape == x.shape and gate.stride(2) == 1 and (groups == 1 or gate.stride(1) == dim)
    assert x.dtype == torch.float32 and x.is_contiguous() and (weight is None or weight.is_contiguous())
    out = form.new_data(num_tokens, groups * dim, gate.dtype, x.device)
    scales = form.new_scales(num_tokens, groups * dim, x.device)
    if not num_tokens:
        return Quantised(out, scales)
    block = power_of_2(dim)
    rows = max(1, GROUPS_BLOCK // block)
    squares = x if ranks is None else x.new_empty((num_tokens, groups, 1))

    def run(norm: str) -> None:
        grid(_gated_norm_kernel, -(-num_tokens * groups // rows))(
            x,
            gate,
            gate if weight is None else weight,
            squares,
            out,
            out if scales is None else scales,
            eps,
            num_tokens * groups,
            groups,
            dim,
            dim if ranks is None else dim * ranks.count,
            gate.stride(0),
            dim if weight is not None and weight.dim() == 2 else 0,
            SILU=act == "silu",
            IS_GATED_FIRST=is_gated_first,
            NORM=norm,
            KIND=KINDS[form.kind],
            GROUP=form.group,
            ROWS=rows,
            BLOCK=block,
            **chain_options(gate, min(16, max(4, block // 512))),
        )

    if weight is None or ranks is None:
        run("none" if weight is None else "whole")
    else:
        run("sum")
        squares = ranks.add(squares)
        run("summed")
    return Quantised(out, scales)


assert TINY == 1e-12, "written out in the kernels"
