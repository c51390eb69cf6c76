"""Sampling in Triton: logits rewritten by their slots' rules, and a draw from each row without sorting it.

A row's filters amount to a threshold: what ranks above it is kept, and of what equals it the first few ids. It is
found by bisection, over the row's best few thousand values where those hold it, else over the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import slot_table
from headrace.kernels._triton_argmax import launch_part_keys
from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels.draw_rows import WEIGHT_BITS
from headrace.kernels.row_noise import UNIFORM_BITS
from headrace.kernels.slot_table import SlotTable
from headrace.seeds import GOLDEN, MULTIPLIERS, SHIFTS, as_int64

SHAPE_TILE = 2048
DRAW_TILE = 4096
NUM_CANDIDATES = 2048

_TEMPERATURE = tl.constexpr(slot_table.TEMPERATURE)
_TOP_P = tl.constexpr(slot_table.TOP_P)
_LOG_MIN_P = tl.constexpr(slot_table.LOG_MIN_P)
_REPETITION = tl.constexpr(slot_table.REPETITION)
_PRESENCE = tl.constexpr(slot_table.PRESENCE)
_FREQUENCY = tl.constexpr(slot_table.FREQUENCY)
_SEED = tl.constexpr(slot_table.SEED)
_TOP_K = tl.constexpr(slot_table.TOP_K)
_MASK_LEN = tl.constexpr(slot_table.MASK_LEN)
_COUNTS = tl.constexpr(slot_table.COUNTS)
_BIASES = tl.constexpr(slot_table.BIASES)
_NUM_INTS = tl.constexpr(slot_table.NUM_INTS)

_GOLDEN = tl.constexpr(as_int64(GOLDEN))
_MULTIPLIER_0 = tl.constexpr(as_int64(MULTIPLIERS[0]))
_MULTIPLIER_1 = tl.constexpr(as_int64(MULTIPLIERS[1]))
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in SHIFTS)
_KEPT_0, _KEPT_1, _KEPT_2 = (tl.constexpr((1 << (64 - shift)) - 1) for shift in SHIFTS)
_UNIFORM_SHIFT = tl.constexpr(64 - UNIFORM_BITS)
_UNIFORM_KEPT = tl.constexpr((1 << UNIFORM_BITS) - 1)
_UNIFORM_STEP = tl.constexpr(2.0**-UNIFORM_BITS)
_PEAK_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
_REACH = tl.constexpr(WEIGHT_BITS * 0.6931471805599453)
"""What is further below the peak, in units of the temperature, weighs nothing."""
_LOWEST = tl.constexpr(-(1 << 31))
_ALL = tl.constexpr(1 << 40)


@triton.jit
def _shape_kernel(
    logits,
    out,
    slots,
    lengths,
    floats,
    ints,
    counts,
    bias_ids,
    bias_values,
    row_stride,
    floats_stride,
    ints_stride,
    biases_stride,
    vocab,
    num_valid,
    num_biases,
    num_stops,
    TILE: tl.constexpr,
):
    """Programs: (tiles of the vocabulary, rows)."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row)
    numbers, whole = floats + slot * floats_stride, ints + slot * ints_stride
    value = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    biases = tl.load(whole + _BIASES)
    if biases >= 0:
        for at in range(num_biases):
            token = tl.load(bias_ids + biases * biases_stride + at)
            bias = tl.load(bias_values + biases * biases_stride + at)
            value = tl.where(index == token, value + bias, value)
    counted = tl.load(whole + _COUNTS)
    if counted >= 0:
        count = tl.load(counts + counted * vocab + index, mask=index < vocab, other=0)
        factor = tl.load(numbers + _REPETITION).to(tl.float32)
        repeated = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        value = tl.where(count > 0, repeated, value)
        value -= (count >> 1).to(tl.float32) * tl.load(numbers + _FREQUENCY).to(tl.float32)
        value = tl.where(count > 1, value - tl.load(numbers + _PRESENCE).to(tl.float32), value)
    if tl.load(lengths + row) + 1 <= tl.load(whole + _MASK_LEN):
        for at in range(num_stops):
            value = tl.where(index == tl.load(whole + _NUM_INTS + at), float("-inf"), value)
    value = tl.where(index < num_valid, value, float("-inf"))
    tl.store(out + row * vocab + index, value, mask=index < vocab)


def launch_shape(logits: Tensor, slots: Tensor, lengths: Tensor, table: SlotTable, *, num_valid: int) -> Tensor:
    """The contract of `shape_logits`."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and table.counts.is_contiguous() and lengths.dtype == slots.dtype == torch.int64
    out = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits.device)
    if num_rows:
        grid(_shape_kernel, triton.cdiv(vocab, SHAPE_TILE), num_rows)(
            logits,
            out,
            slots,
            lengths,
            table.floats,
            table.ints,
            table.counts,
            table.bias_ids,
            table.bias_values,
            logits.stride(0),
            table.floats.stride(0),
            table.ints.stride(0),
            table.bias_ids.stride(0),
            vocab,
            num_valid,
            table.bias_ids.shape[1],
            table.ints.shape[1] - slot_table.NUM_INTS,
            TILE=SHAPE_TILE,
            num_warps=8,
            # a product and a sum, each rounded as the torch form rounds it
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _mix(value):
    value = (value ^ ((value >> _SHIFT_0) & _KEPT_0)) * _MULTIPLIER_0
    value = (value ^ ((value >> _SHIFT_1) & _KEPT_1)) * _MULTIPLIER_1
    return value ^ ((value >> _SHIFT_2) & _KEPT_2)


@triton.jit
def _uniform(seed, position, stream):
    bits = _mix(_mix(seed + stream) + (position + 1) * _GOLDEN)
    shifted = (bits >> _UNIFORM_SHIFT) & _UNIFORM_KEPT
    return (shifted.to(tl.float64) + 0.5) * _UNIFORM_STEP


@triton.jit
def _order(value):
    """Integers in the order of the floats, both zeros the same."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(value, top, temperature, log_min_p):
    scaled = tl.minimum(tl.div_rn(value - top, temperature), 0.0)
    scaled = tl.where(value > float("-inf"), scaled, -1e4)  # a NaN too
    weight = (tl.exp2(scaled * 1.4426950408889634) * _PEAK_WEIGHT).to(tl.int64)
    return tl.where(scaled >= log_min_p, weight, 0)


@triton.jit
def _load(values, start, vocab, TILE: tl.constexpr):
    index = start + tl.arange(0, TILE)
    return tl.load(values + index, mask=index < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _above(values, vocab, key, top, temperature, log_min_p, MASS: tl.constexpr, TILE: tl.constexpr):
    """How many of the row's values are at `key` or above it, or what they weigh."""
    found = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        value = _load(values, start, vocab, TILE)
        inside = (_order(value) >= key) & (start + tl.arange(0, TILE) < vocab)
        if MASS:
            found += tl.where(inside, _weigh(value, top, temperature, log_min_p), 0)
        else:
            found += inside.to(tl.int64)
    return tl.sum(found, 0)


@triton.jit
def _narrow(values, candidates, vocab, top, temperature, top_k, NUM: tl.constexpr, TILE: tl.constexpr):
    """Copy the row's largest values, `top_k` of them or more, NUM at the most. -> (how many, 0 for none; the smallest
    key that they may have)"""
    want = tl.where(top_k > 0, top_k, NUM // 4)
    low = top - temperature * _REACH
    high = top
    at = top - temperature * (_REACH / 4)
    count = tl.zeros((), tl.int64)
    is_found = want > NUM
    for _ in range(16):
        if not is_found:
            found = tl.zeros((TILE,), tl.int32)
            for start in range(0, vocab, TILE):
                found += (_load(values, start, vocab, TILE) >= at).to(tl.int32)
            count = tl.sum(found, 0).to(tl.int64)
            is_found = (count >= want) & (count <= NUM)
            if count > NUM:
                low = at
            elif count < want:
                high = at
            if not is_found:
                at = 0.5 * low + 0.5 * high
    count = tl.where((count >= want) & (count <= NUM), count, 0)
    if count > 0:
        offset = tl.zeros((), tl.int32)
        for start in range(0, vocab, TILE):
            value = _load(values, start, vocab, TILE)
            inside = value >= at
            num = tl.sum(inside.to(tl.int32), 0)
            if num > 0:
                place = offset + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(candidates + place, value, mask=inside)
                offset += num
        tl.debug_barrier()
    return count, _order(at)


@triton.jit
def _kth_key(values, vocab, keys, count, lowest, highest, top_k, TILE: tl.constexpr):
    """-> (the key of the value that ranks `top_k`th, how many rank above that key)"""
    low, high = lowest, highest
    while low < high:
        middle = low + (high - low + 1) // 2
        if count > 0:
            num = tl.sum((keys >= middle).to(tl.int64), 0)
        else:
            num = _above(values, vocab, middle, 0.0, 1.0, 0.0, False, TILE)
        if num >= top_k:
            low = middle
        else:
            high = middle - 1
    if count > 0:
        num = tl.sum((keys > low).to(tl.int64), 0)
    else:
        num = _above(values, vocab, low + 1, 0.0, 1.0, 0.0, False, TILE)
    return low, num


@triton.jit
def _key_of_mass(
    values, vocab, keys, weights, count, lowest, highest, bound, top, temperature, log_min_p, TILE: tl.constexpr
):
    """-> (the largest key from which on the values weigh `bound`, but not less than `lowest`; the weight above it)"""
    low, high = lowest, highest
    while low < high:
        middle = low + (high - low + 1) // 2
        if count > 0:
            mass = tl.sum(tl.where(keys >= middle, weights, 0), 0)
        else:
            mass = _above(values, vocab, middle, top, temperature, log_min_p, True, TILE)
        if mass >= bound:
            low = middle
        else:
            high = middle - 1
    if count > 0:
        mass = tl.sum(tl.where(keys > low, weights, 0), 0)
    else:
        mass = _above(values, vocab, low + 1, top, temperature, log_min_p, True, TILE)
    return low, mass


@triton.jit
def _threshold(values, candidates, vocab, top, highest, temperature, log_min_p, top_k, top_p,
               NUM: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """What the filters keep. -> (key, how many of those that equal it, weight of all that is kept)"""
    key = tl.full((), _LOWEST, tl.int64)
    ties = tl.full((), _ALL, tl.int64)
    total = tl.zeros((), tl.int64)
    if (top_k > 0) | (top_p < 1.0):
        count, lowest = _narrow(values, candidates, vocab, top, temperature, top_k, NUM, TILE)
        index = tl.arange(0, NUM)
        value = tl.load(candidates + index, mask=index < count, other=float("-inf"))
        keys = tl.where(index < count, _order(value), _LOWEST)
        weights = tl.where(index < count, _weigh(value, top, temperature, log_min_p), 0)
        lowest = tl.where(count > 0, lowest, key)
        if top_k > 0:
            key, num_above = _kth_key(values, vocab, keys, count, lowest, highest, top_k, TILE)
            ties = top_k - num_above
            lowest = key
            weight = _weigh(_value_of(key), top, temperature, log_min_p)
            if count > 0:
                total = tl.sum(tl.where(keys > key, weights, 0), 0) + ties * weight
            else:
                total = _above(values, vocab, key + 1, top, temperature, log_min_p, True, TILE) + ties * weight
        else:
            total = _above(values, vocab, key, top, temperature, log_min_p, True, TILE)
        if top_p < 1.0:
            share = top_p * total.to(tl.float64)
            bound = share.to(tl.int64)
            bound += (bound.to(tl.float64) < share).to(tl.int64)
            if top_k == 0:
                if tl.sum(weights, 0) < bound:  # the candidates don't hold all of it
                    count = tl.zeros((), tl.int64)
                    lowest = key
            at, mass = _key_of_mass(
                values, vocab, keys, weights, count, lowest, highest, bound, top, temperature, log_min_p, TILE
            )
            weight = tl.maximum(_weigh(_value_of(at), top, temperature, log_min_p), 1)
            num = (bound - mass + weight - 1) // weight
            ties = tl.where(at == key, tl.minimum(ties, num), num)
            key = at
            total = mass + ties * weight
    else:
        total = _above(values, vocab, key, top, temperature, log_min_p, True, TILE)
    return key, ties, total


@triton.jit
def _pick(values, vocab, key, ties, target, token, top, temperature, log_min_p, TILE: tl.constexpr):
    """The first id of those kept with which their weight exceeds `target`; `token` where there is none."""
    start = 0
    passed = tl.zeros((), tl.int64)
    num_ties = tl.zeros((), tl.int64)
    while start < vocab:
        value = _load(values, start, vocab, TILE)
        keys = _order(value)
        is_tie = keys == key
        kept = keys > key
        num = tl.sum(is_tie.to(tl.int32), 0)
        if num_ties + num <= ties:
            kept = kept | is_tie
        else:
            kept = kept | (is_tie & (num_ties + tl.cumsum(is_tie.to(tl.int32), 0) <= ties))
        num_ties += num
        weight = tl.where(kept, _weigh(value, top, temperature, log_min_p), 0)
        mass = tl.sum(weight, 0)
        if passed + mass > target:
            is_past = passed + tl.cumsum(weight, 0) > target
            index = tl.where(is_past, start + tl.arange(0, TILE), 0x7FFFFFFF)
            token = tl.min(index, 0).to(tl.int64)
            start = vocab
        passed += mass
        start += TILE
    return token


@triton.jit(do_not_specialize=["stream"])
def _draw_kernel(
    logits,
    part_keys,
    out,
    candidates,
    slots,
    lengths,
    floats,
    ints,
    row_stride,
    floats_stride,
    ints_stride,
    vocab,
    num_parts,
    stream,
    PARTS: tl.constexpr,
    NUM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Programs: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(part_keys + row * num_parts + part, mask=part < num_parts, other=-0x7FFFFFFFFFFFFFFF), 0)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    highest = best >> 32
    peak = _value_of(highest)
    slot = tl.load(slots + row)
    numbers, whole = floats + slot * floats_stride, ints + slot * ints_stride
    temperature = tl.load(numbers + _TEMPERATURE).to(tl.float32)
    if (temperature > 0.0) & (peak > float("-inf")):  # false for a NaN
        top = tl.minimum(peak, 3.4028234663852886e38)
        log_min_p = tl.load(numbers + _LOG_MIN_P).to(tl.float32)
        values = logits + row * row_stride
        key, ties, total = _threshold(
            values, candidates + row * NUM, vocab, top, highest, temperature, log_min_p,
            tl.load(whole + _TOP_K), tl.load(numbers + _TOP_P), NUM, TILE,
        )  # fmt: skip
        noise = _uniform(tl.load(whole + _SEED), tl.load(lengths + row), stream)
        target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
        token = _pick(values, vocab, key, ties, target, token, top, temperature, log_min_p, TILE)
    tl.store(out + row, token)


def launch_draw(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    table: SlotTable,
    *,
    purpose: int,
    tuning: tuple[int, int, int] = (DRAW_TILE, NUM_CANDIDATES, 16),
) -> Tensor:
    """The contract of `draw_rows`.

    Args:
        tuning: (values a pass loads at once, most candidates, warps).
    """
    num_rows, vocab = logits.shape
    assert lengths.dtype == slots.dtype == torch.int64
    tile, num_candidates, warps = tuning
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    keys = launch_part_keys(logits)
    candidates = torch.empty((num_rows, num_candidates), dtype=torch.float32, device=logits.device)
    grid(_draw_kernel, num_rows)(
        logits,
        keys,
        out,
        candidates,
        slots,
        lengths,
        table.floats,
        table.ints,
        logits.stride(0),
        table.floats.stride(0),
        table.ints.stride(0),
        vocab,
        keys.shape[1],
        as_int64(GOLDEN * (purpose + 1)),
        PARTS=power_of_2(keys.shape[1]),
        NUM=num_candidates,
        TILE=tile,
        num_warps=warps,
    )
    return out
