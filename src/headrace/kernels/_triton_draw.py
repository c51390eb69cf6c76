"""A draw from each row of logits without sorting it, in Triton.

A row's filters amount to a threshold in the ranking. Rows are read in parts by many programs: for the peak and a bound
of how far under it the filters reach; for top_p alone, to weigh the values in bins of that depth, one of which it ends
in; to gather the candidates around the threshold, few as a rule, and to weigh all above them. Then the threshold
is found among a row's candidates, and the token by bisection of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import slot_table
from headrace.kernels._triton_chain import chain_options, grid, power_of_2, wait_for_predecessor
from headrace.kernels.draw_rows import WEIGHT_BITS
from headrace.kernels.row_noise import UNIFORM_BITS
from headrace.kernels.slot_table import SlotTable
from headrace.seeds import GOLDEN, MULTIPLIERS, SHIFTS, as_int64

GROUP = 64
"""The k largest maxima of groups of so many values bound the k-th largest value from below."""

_TEMPERATURE = tl.constexpr(slot_table.TEMPERATURE)
_TOP_P = tl.constexpr(slot_table.TOP_P)
_LOG_MIN_P = tl.constexpr(slot_table.LOG_MIN_P)
_SEED = tl.constexpr(slot_table.SEED)
_TOP_K = tl.constexpr(slot_table.TOP_K)

_GOLDEN = tl.constexpr(as_int64(GOLDEN))
_MULTIPLIER_0 = tl.constexpr(as_int64(MULTIPLIERS[0]))
_MULTIPLIER_1 = tl.constexpr(as_int64(MULTIPLIERS[1]))
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in SHIFTS)
_KEPT_0, _KEPT_1, _KEPT_2 = (tl.constexpr((1 << (64 - shift)) - 1) for shift in SHIFTS)
_UNIFORM_SHIFT = tl.constexpr(64 - UNIFORM_BITS)
_UNIFORM_KEPT = tl.constexpr((1 << UNIFORM_BITS) - 1)
_UNIFORM_STEP = tl.constexpr(2.0**-UNIFORM_BITS)
_PEAK_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
_NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_ALL = tl.constexpr(0x7FFFFFFF)
_HEAVIEST = tl.constexpr(1 << WEIGHT_BITS)

_NUM_BINS = tl.constexpr(2048)
_ARRIVED, _NUM_FOUND = tl.constexpr(2048), tl.constexpr(2049)
_ZEROS = tl.constexpr(2056)
"""Columns of the numbers that are zero between launches: weights of bins, programs that are done, candidates."""
_BEST, _FIRST, _LAST, _BOUND = (tl.constexpr(column) for column in range(4))
_RECORD = tl.constexpr(4)
"""Columns of what one launch tells the next about a row: the best key; the first and the last bin of the candidates,
first -1 where nothing is drawn; the weight that top_p alone asks for. Values in bins before the first are kept. Before
top_p's bin is known, first is beyond last."""


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
def _ordered(value):
    """Integers in the order of the values, none of them the smallest there is. A NaN is the largest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _rank_key(value, index):
    """Integers in the order of the ranking: the larger value, then the smaller id."""
    return (_ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _best_key(value, index, vocab):
    """The largest `_rank_key` of ids in the vocabulary, found with half the bits at a time."""
    ordered = tl.where(index < vocab, _ordered(value), -0x80000000)
    top = tl.max(ordered, 0)
    at = tl.min(tl.where(ordered == top, index, 0x7FFFFFFF), 0)
    return (top.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def _value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _scale(value, top, factor):
    scaled = tl.minimum((value - top) * factor, 0.0)
    return tl.where(value > float("-inf"), scaled, -1e4)  # a NaN too


@triton.jit
def _weigh(value, top, factor, log_min_p):
    scaled = _scale(value, top, factor)
    weight = (tl.exp2(scaled * _LOG2_E) * _PEAK_WEIGHT).to(tl.int64)
    return tl.where(scaled >= log_min_p, weight, 0)


@triton.jit
def _bin(scaled):
    """512 each for depths to 2, 6, 14 and 30: narrow near the peak, so that the values of flat rows are told apart."""
    return tl.minimum(((2.0 - scaled).to(tl.int32, bitcast=True) >> 14) - (0x40000000 >> 14), _NUM_BINS - 1)


@triton.jit
def _bound(top_p, total):
    """The least whole mass that is not under `top_p` of the total; the first token always stays."""
    share = top_p * total.to(tl.float64)
    bound = share.to(tl.int64)
    return tl.maximum(bound + (bound.to(tl.float64) < share).to(tl.int64), 1)


@triton.jit
def _arrive(counter, num_programs):
    """Whether all others have arrived: then what they stored can be read, past the L1 cache."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_programs - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def _bin_of_rank(bins, top_k):
    """The first bin up to which there are `top_k` of `bins`; the last one where there are fewer."""
    low = tl.zeros((), tl.int32)
    high = low + (_NUM_BINS - 1)
    while low < high:
        middle = (low + high) // 2
        if tl.sum((bins <= middle).to(tl.int32), 0) >= top_k:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _bin_of_tail(keys, sums, top, factor, log_min_p, top_p, vocab):
    """A bin past which all values together are too light for `top_p` to reach them. sums: of parts, of `exp` under
    their own best, `keys`"""
    total = tl.sum(sums * tl.exp2(_scale(_value_of(keys), top, factor) * _LOG2_E), 0)
    # rounded, so a little less; of what min_p leaves, only the peak's is known
    total = tl.where(log_min_p > float("-inf"), 1.0, tl.maximum(0.99 * total, 1.0))
    depth = tl.log(vocab / (tl.maximum((1.0 - top_p).to(tl.float32), 1e-20) * total))
    return tl.minimum(_bin(-tl.maximum(depth, 0.0)) + 1, _NUM_BINS - 1)


@triton.jit
def _rule(row, slots, floats, ints, floats_stride, ints_stride):
    """-> (1 / temperature, log min_p, top_k, top_p); 0 where nothing is drawn"""
    slot = tl.load(slots + row)
    numbers = floats + slot * floats_stride
    temperature = tl.load(numbers + _TEMPERATURE).to(tl.float32)
    log_min_p = tl.load(numbers + _LOG_MIN_P).to(tl.float32)
    factor = tl.where(temperature > 0.0, tl.div_rn(1.0, temperature), 0.0)
    return factor, log_min_p, tl.load(ints + slot * ints_stride + _TOP_K), tl.load(numbers + _TOP_P)


@triton.jit
def _load_keys(values, index, vocab):
    value = tl.load(values + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(index < vocab, _rank_key(value, index), _NO_KEY)


@triton.jit
def _reach(keys, part_sums, maxima, top, factor, log_min_p, top_k, top_p, vocab, num_parts,
           PARTS: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """The last bin that a row's filters need to tell apart; -1 without filters. keys: the best of each part"""
    last = tl.full((), -1, tl.int32)
    if top_k > 0:
        index = tl.arange(0, PARTS * GROUPS)
        inside = index < num_parts * GROUPS
        value = tl.load(maxima + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
        is_light = _weigh(value, top, factor, log_min_p) == 0
        last = _bin_of_rank(tl.where(is_light, _NUM_BINS, _bin(_scale(value, top, factor))), top_k)
    elif top_p < 1.0:
        part = tl.arange(0, PARTS)
        sums = tl.load(part_sums + part, mask=part < num_parts, other=0.0, cache_modifier=".cg")
        last = _bin_of_tail(keys, sums, top, factor, log_min_p, top_p, vocab)
    return last


@triton.jit(do_not_specialize=["num_parts"])
def _peak_kernel(
    logits,
    out,
    record,
    zeros,
    part_keys,
    part_sums,
    maxima,
    slots,
    floats,
    ints,
    row_stride,
    floats_stride,
    ints_stride,
    vocab,
    num_parts,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    GROUPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (parts, rows). The best token, and how far down the filters can reach."""
    wait_for_predecessor(CHAINED)
    at, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    factor, log_min_p, top_k, top_p = _rule(row, slots, floats, ints, floats_stride, ints_stride)
    own, first_part = record + row * _RECORD, row * num_parts
    index = at * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    best = _best_key(value, index, vocab)
    tl.store(part_keys + first_part + at, best)
    if top_k > 0:
        place = maxima + (first_part + at) * GROUPS + tl.arange(0, GROUPS)
        tl.store(place, tl.max(tl.reshape(value, (GROUPS, PART // GROUPS)), 1))
    elif top_p < 1.0:
        scaled = _scale(value, tl.minimum(_value_of(best), _MAX_FLOAT), factor)
        tl.store(part_sums + first_part + at, tl.sum(tl.exp2(scaled * _LOG2_E), 0))
    if not _arrive(zeros + row * _ZEROS + _ARRIVED, num_parts):
        return
    part = tl.arange(0, PARTS)
    keys = tl.load(part_keys + first_part + part, mask=part < num_parts, other=_NO_KEY, cache_modifier=".cg")
    best = tl.max(keys, 0)
    tl.store(out + row, _id_of(best))
    peak = _value_of(best)
    first = tl.full((), -1, tl.int32)
    last = tl.full((), -1, tl.int32)
    if (factor > 0.0) & (peak > float("-inf")):  # false for a NaN
        first = tl.where(top_k > 0, 0, _NUM_BINS)
        last = _reach(keys, part_sums + first_part, maxima + first_part * GROUPS, tl.minimum(peak, _MAX_FLOAT),
                      factor, log_min_p, top_k, top_p, vocab, num_parts, PARTS, GROUPS)  # fmt: skip
    tl.store(own + _BEST, best)
    tl.store(own + _FIRST, first)
    tl.store(own + _LAST, last)


@triton.jit(do_not_specialize=["num_parts"])
def _bins_kernel(
    logits,
    record,
    zeros,
    part_mass,
    slots,
    floats,
    ints,
    row_stride,
    floats_stride,
    ints_stride,
    vocab,
    num_parts,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (parts, rows). Rows with top_p alone: the bin in which it ends."""
    wait_for_predecessor(CHAINED)
    at, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = record + row * _RECORD
    first, last = tl.load(own + _FIRST).to(tl.int32), tl.load(own + _LAST).to(tl.int32)
    if (last < 0) | (first <= last):
        return
    factor, log_min_p, _, top_p = _rule(row, slots, floats, ints, floats_stride, ints_stride)
    top = tl.minimum(_value_of(tl.load(own + _BEST)), _MAX_FLOAT)
    index = at * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    weight = _weigh(value, top, factor, log_min_p)
    bins = _bin(_scale(value, top, factor))
    masses = zeros + row * _ZEROS
    tl.store(part_mass + row * num_parts + at, tl.sum(weight, 0))
    tl.atomic_add(masses + bins, weight, mask=(weight > 0) & (bins <= last), sem="relaxed")
    if not _arrive(masses + _ARRIVED, num_parts):
        return
    part = tl.arange(0, PARTS)
    masked = part < num_parts
    total = tl.sum(tl.load(part_mass + row * num_parts + part, mask=masked, other=0, cache_modifier=".cg"), 0)
    bound = _bound(top_p, total)
    places = masses + tl.arange(0, _NUM_BINS)
    through = tl.cumsum(tl.load(places, cache_modifier=".cg"), 0)
    tl.debug_barrier()
    tl.store(places, tl.zeros((_NUM_BINS,), tl.int64))
    ending = tl.sum((through < bound).to(tl.int32), 0)
    is_found = ending < _NUM_BINS  # else all that weighs anything is a candidate
    tl.store(own + _FIRST, tl.where(is_found, ending, 0))
    tl.store(own + _LAST, tl.where(is_found, ending, _NUM_BINS - 1))
    tl.store(own + _BOUND, bound)


@triton.jit
def _candidate_weights(keys, first, last, top, factor, log_min_p):
    value = _value_of(keys)
    bins = _bin(_scale(value, top, factor))
    return tl.where((bins >= first) & (bins <= last), _weigh(value, top, factor, log_min_p), 0)


@triton.jit
def _held(keys, weights, lowest, end, values, first, last, top, factor, log_min_p, size, unit, NUM: tl.constexpr):
    """What the candidates from the key `lowest` on weigh, of ids under `end`; each at most `unit`. Where they are more
    than NUM, `keys` are the first of the row, and `size` is its length."""
    held = tl.sum(tl.where((keys >= lowest) & (_id_of(keys) < end), tl.minimum(weights, unit), 0), 0)
    for start in range(NUM, size, NUM):
        others = _load_keys(values, start + tl.arange(0, NUM), size)
        more = tl.minimum(_candidate_weights(others, first, last, top, factor, log_min_p), unit)
        held += tl.sum(tl.where((others >= lowest) & (_id_of(others) < end), more, 0), 0)
    return held


@triton.jit
def _cut(keys, weights, bound, values, first, last, top, factor, log_min_p, size, unit, NUM: tl.constexpr):
    """The largest key from which on the candidates hold `bound`, or a key with which all are kept."""
    is_over = size > 0
    lowest = tl.zeros((), tl.int64)
    for phase in range(2):  # by value, and of those that equal it by id
        is_value = phase == 0
        part = tl.where(is_value, keys >> 32, keys & 0x7FFFFFFF)
        inside = tl.where(is_value, weights > 0, (weights > 0) & (keys >> 32 == lowest >> 32))
        low, high = tl.min(tl.where(inside, part, 0x7FFFFFFF), 0), tl.max(tl.where(inside, part, -(1 << 31)), 0)
        low = tl.where(is_over, tl.where(is_value, -(1 << 31), 0x7FFFFFFF - size), low)
        high = tl.where(is_over, 0x7FFFFFFF, high)
        unit_of_part = tl.where(is_value, 1 << 32, 1)
        while low < high:
            middle = low + (high - low + 1) // 2
            held = _held(keys, weights, lowest + middle * unit_of_part, _ALL, values, first, last, top, factor,
                         log_min_p, size, unit, NUM)  # fmt: skip
            if held >= bound:
                low = middle
            else:
                high = middle - 1
        lowest += low * unit_of_part
    return lowest


@triton.jit
def _threshold(keys, weights, bound, values, first, last, top, factor, log_min_p, top_k, top_p, size,
               NUM: tl.constexpr):  # fmt: skip
    """-> (the least key of a candidate that is kept, weight of all that are). bound: of top_p, if there's no top_k"""
    lowest = tl.full((), _NO_KEY, tl.int64)
    held = tl.zeros((), tl.int64)
    for step in range(2):
        is_ranked = step == 0
        if (is_ranked & (top_k > 0)) | ((step == 1) & (top_p < 1.0)):
            cut = _cut(keys, weights, tl.where(is_ranked, top_k, bound), values, first, last, top, factor,
                       log_min_p, size, tl.where(is_ranked, 1, _HEAVIEST), NUM)  # fmt: skip
            lowest = tl.maximum(lowest, cut)
            held = _held(keys, weights, lowest, _ALL, values, first, last, top, factor, log_min_p, size,
                         _HEAVIEST, NUM)  # fmt: skip
            bound = _bound(top_p, held)
    return lowest, held


@triton.jit(do_not_specialize=["num_parts"])
def _gather_kernel(
    logits,
    record,
    zeros,
    part_mass,
    candidates,
    slots,
    floats,
    ints,
    row_stride,
    floats_stride,
    ints_stride,
    vocab,
    num_parts,
    PART: tl.constexpr,
    NUM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (parts, rows). The candidates, and what the values above them weigh."""
    wait_for_predecessor(CHAINED)
    at, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = record + row * _RECORD
    first, last = tl.load(own + _FIRST).to(tl.int32), tl.load(own + _LAST).to(tl.int32)
    if first < 0:
        return
    factor, log_min_p, _, _ = _rule(row, slots, floats, ints, floats_stride, ints_stride)
    top = tl.minimum(_value_of(tl.load(own + _BEST)), _MAX_FLOAT)
    index = at * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    weight = _weigh(value, top, factor, log_min_p)
    bins = _bin(_scale(value, top, factor))
    tl.store(part_mass + row * num_parts + at, tl.sum(tl.where(bins < first, weight, 0), 0))
    inside = (weight > 0) & (bins >= first) & (bins <= last)
    if tl.max(inside.to(tl.int32), 0) > 0:
        counters = zeros + row * _ZEROS + _NUM_FOUND + tl.zeros((PART,), tl.int32)
        place = tl.atomic_add(counters, 1, mask=inside, sem="relaxed").to(tl.int32)
        tl.store(candidates + row * NUM + place, _rank_key(value, index), mask=inside & (place < NUM))


@triton.jit
def _token(values, keys, weights, mass, lowest, total, count, noise, first, last, top, factor, log_min_p, size,
           vocab, num_parts, PARTS: tl.constexpr, PART: tl.constexpr, NUM: tl.constexpr):  # fmt: skip
    """The first id with which what is kept weighs more than the share `noise` of it all."""
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.arange(0, PARTS)
    low = tl.zeros((), tl.int32)
    high = low + num_parts - 1
    passed = tl.zeros((), tl.int64)
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.sum(tl.where(part < middle, mass, 0), 0)
        if count > 0:
            before += _held(keys, weights, lowest, middle * PART, values, first, last, top, factor, log_min_p,
                            size, _HEAVIEST, NUM)  # fmt: skip
        if before <= target:
            low = middle
            passed = before
        else:
            high = middle - 1
    index = low * PART + tl.arange(0, PART)
    value = tl.load(values + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    weight, bins = _weigh(value, top, factor, log_min_p), _bin(_scale(value, top, factor))
    is_kept = (bins < first) | ((bins <= last) & (_rank_key(value, index) >= lowest))
    through = tl.cumsum(tl.where(is_kept, weight, 0), 0)
    return low * PART + tl.sum((passed + through <= target).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_parts", "stream"])
def _pick_kernel(
    logits,
    out,
    record,
    zeros,
    part_mass,
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
    PART: tl.constexpr,
    NUM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Programs: (rows)."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    own = record + row * _RECORD
    first, last = tl.load(own + _FIRST).to(tl.int32), tl.load(own + _LAST).to(tl.int32)
    if first < 0:
        return
    factor, log_min_p, top_k, top_p = _rule(row, slots, floats, ints, floats_stride, ints_stride)
    top = tl.minimum(_value_of(tl.load(own + _BEST)), _MAX_FLOAT)
    noise = _uniform(tl.load(ints + tl.load(slots + row) * ints_stride + _SEED), tl.load(lengths + row), stream)
    values, num_found = logits + row * row_stride, zeros + row * _ZEROS + _NUM_FOUND
    count = tl.load(num_found)
    tl.debug_barrier()
    tl.store(num_found, 0)
    part = tl.arange(0, PARTS)
    mass = tl.load(part_mass + row * num_parts + part, mask=part < num_parts, other=0)
    total = tl.sum(mass, 0)
    index = tl.arange(0, NUM)
    if count > NUM:
        keys = _load_keys(values, index, vocab)
    else:
        keys = tl.load(candidates + row * NUM + index, mask=index < count, other=_NO_KEY)
    weights = _candidate_weights(keys, first, last, top, factor, log_min_p)
    size = tl.where(count > NUM, vocab, 0)
    lowest = tl.full((), _NO_KEY, tl.int64)
    if count > 0:
        bound = tl.load(own + _BOUND) - total
        lowest, held = _threshold(keys, weights, bound, values, first, last, top, factor, log_min_p, top_k, top_p,
                                  size, NUM)  # fmt: skip
        total += held
    token = _token(values, keys, weights, mass, lowest, total, count, noise, first, last, top, factor, log_min_p,
                   size, vocab, num_parts, PARTS, PART, NUM)  # fmt: skip
    tl.store(out + row, token)


class DrawTuning(NamedTuple):
    part: int = 4096
    """Values of a program."""
    candidates: int = 2048
    """A row with more of them around its threshold is read again and again."""
    warps: int = 8
    registers: int | None = None
    """Most of a thread, None for no limit."""
    pick_warps: int = 8
    """Of the programs that finish one row each."""
    pick_registers: int | None = 128


def launch_draw(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    table: SlotTable,
    *,
    purpose: int,
    tuning: DrawTuning | None = None,
) -> Tensor:
    """The contract of `draw_rows`."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and lengths.dtype == slots.dtype == torch.int64
    tuning = tuning or DrawTuning()
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    num_parts = triton.cdiv(vocab, tuning.part)
    num_groups = tuning.part // GROUP
    zeros = _zeros(num_rows, device)
    record = torch.empty((num_rows, _RECORD.value), dtype=torch.int64, device=device)
    part_keys, part_mass = torch.empty((2, num_rows, num_parts), dtype=torch.int64, device=device)
    part_sums = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    maxima = torch.empty((num_rows, num_parts, num_groups), dtype=torch.float32, device=device)
    candidates = torch.empty((num_rows, tuning.candidates), dtype=torch.int64, device=device)
    strides = (logits.stride(0), table.floats.stride(0), table.ints.stride(0))
    parts, options = power_of_2(num_parts), chain_options(logits, tuning.warps) | {"maxnreg": tuning.registers}
    programs = (num_parts, num_rows)
    grid(_peak_kernel, *programs)(
        logits, out, record, zeros, part_keys, part_sums, maxima, slots, table.floats, table.ints, *strides,
        vocab, num_parts, PARTS=parts, PART=tuning.part, GROUPS=num_groups, **options,
    )  # fmt: skip
    grid(_bins_kernel, *programs)(
        logits, record, zeros, part_mass, slots, table.floats, table.ints, *strides, vocab, num_parts,
        PARTS=parts, PART=tuning.part, **options,
    )  # fmt: skip
    grid(_gather_kernel, *programs)(
        logits, record, zeros, part_mass, candidates, slots, table.floats, table.ints, *strides, vocab, num_parts,
        PART=tuning.part, NUM=tuning.candidates, **options,
    )  # fmt: skip
    grid(_pick_kernel, num_rows)(
        logits, out, record, zeros, part_mass, candidates, slots, lengths, table.floats, table.ints, *strides,
        vocab, num_parts, as_int64(GOLDEN * (purpose + 1)), PARTS=parts, PART=tuning.part, NUM=tuning.candidates,
        maxnreg=tuning.pick_registers, **chain_options(logits, tuning.pick_warps),
    )  # fmt: skip
    return out


_zeroed: dict[torch.device, list[Tensor]] = {}


def _zeros(num_rows: int, device: torch.device) -> Tensor:
    """[rows, _ZEROS] int64, `num_rows` of them or more, that every launch leaves at zero: launches of one stream share
    them. Smaller ones are kept, since graphs may hold them."""
    held = _zeroed.setdefault(device, [])
    if not held or len(held[-1]) < num_rows:
        fresh = torch.zeros((max(power_of_2(num_rows), 64), _ZEROS.value), dtype=torch.int64, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return fresh  # the graph's own, which it clears at each replay
        held.append(fresh)
    return held[-1]
