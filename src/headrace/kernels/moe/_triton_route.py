"""Triton kernels that choose experts for tokens, and sort tokens by expert.

Sorted are pairs of a token and one of its experts, `token * top_k + choice`, in tiles: a tile's pairs share an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels._triton_chain import grid, power_of_2
from headrace.kernels.moe.port import Routed, Routing

ONE_PROGRAM_PAIRS = 4096
"""Up to here one program sorts them all; beyond, kernels count, plan and place one after another."""
BLOCK = 1024


@triton.jit
def _best_groups(choice, expert, groups: tl.constexpr, top_groups: tl.constexpr, size, IS_MAX: tl.constexpr):
    """[experts] bool: experts of the best groups; of equal groups the first."""
    by_group = tl.full(choice.shape, float("-inf"), tl.float32)
    group_of = expert // size
    for group in tl.static_range(groups):
        inside = tl.where(group_of == group, choice, float("-inf"))
        best = tl.max(inside, 0)
        if not IS_MAX:
            at = tl.min(tl.where(inside == best, expert, 1 << 30), 0)
            best += tl.max(tl.where(expert == at, float("-inf"), inside), 0)
        by_group = tl.where(group_of == group, best, by_group)
    kept = expert < 0
    for _ in tl.static_range(top_groups):
        left = tl.where(kept, float("-inf"), by_group)
        found = tl.min(tl.where((left == tl.max(left, 0)) & ~kept, group_of, 1 << 30), 0)
        kept = kept | (group_of == found)
    return kept


@triton.jit
def _route_kernel(
    logits,
    correction,
    ids,
    weights,
    row_stride,
    num_experts,
    scaling,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    IS_MAX: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
):
    """Programs: tokens."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    mask = expert < num_experts
    scores = tl.load(logits + token * row_stride + expert, mask=mask, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    if SCORING == "sqrt_softplus":
        scores = tl.sqrt(tl.maximum(scores, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(scores))))
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=mask, other=0.0)
    choice = tl.where(mask, choice, float("-inf"))
    if GROUPS > 1:
        kept = _best_groups(choice, expert, GROUPS, TOP_GROUPS, num_experts // GROUPS, IS_MAX)
        choice = tl.where(kept, choice, float("-inf"))
    slot = tl.arange(0, CHOICES)
    chosen = tl.zeros((CHOICES,), tl.int32)
    picked = tl.full((CHOICES,), float("-inf"), tl.float32)
    for at in tl.static_range(TOP_K):
        best = tl.min(tl.where(choice == tl.max(choice, 0), expert, num_experts - 1), 0)  # in range for a NaN as well
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        chosen = tl.where(slot == at, best, chosen)
        picked = tl.where(slot == at, weight, picked)
        choice = tl.where(expert == best, float("-inf"), choice)
    used = slot < TOP_K
    if SCORING == "softmax_top":
        picked = tl.exp(picked - tl.max(picked, 0))
        picked = picked / tl.sum(picked, 0)
    if SCORING == "sigmoid_top":
        picked = 1.0 / (1.0 + tl.exp(-picked))
    picked = tl.where(used, picked, 0.0)
    if NORMALISE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    tl.store(ids + token * TOP_K + slot, chosen, mask=used)
    tl.store(weights + token * TOP_K + slot, picked * scaling, mask=used)


def launch_route(logits: Tensor, correction: Tensor | None, routing: Routing) -> Routed:
    """The contract of `MoeBackend.route`."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1 and num_experts == routing.num_experts
    ids = torch.empty((num_tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        grid(_route_kernel, num_tokens)(
            logits,
            logits if correction is None else correction,
            ids,
            weights,
            logits.stride(0),
            num_experts,
            routing.scaling,
            EXPERTS=power_of_2(num_experts),
            TOP_K=routing.top_k,
            CHOICES=power_of_2(routing.top_k),
            SCORING=routing.scoring,
            NORMALISE=routing.normalise,
            GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups,
            IS_MAX=routing.group_score == "max",
            HAS_CORRECTION=correction is not None,
            num_warps=1 if num_experts <= 256 else 4,
        )
    return Routed(ids, weights)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs sorted by expert."""

    pairs: Tensor  # [max_tiles * rows] int32; num_pairs where there is none
    experts: Tensor  # [max_tiles] int32, the expert on this rank of each tile; -1 behind the last one
    rows: int
    """Of a tile."""

    @property
    def max_tiles(self) -> int:
        return self.experts.shape[0]


@triton.jit
def _expert_of(ids, index, num_pairs, first_expert, num_experts):
    """(expert on this rank, whether it is on this rank)"""
    expert = tl.load(ids + index, mask=index < num_pairs, other=-1) - first_expert
    return expert, (index < num_pairs) & (expert >= 0) & (expert < num_experts)


@triton.jit
def _plan(counts, places, experts, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Where each expert's tiles begin, and which expert each tile is of."""
    expert = tl.arange(0, EXPERTS)
    mask = expert < num_experts
    count = tl.load(counts + expert, mask=mask, other=0, cache_modifier=".cg")
    tiles = (count + ROWS - 1) // ROWS
    begin = tl.cumsum(tiles, 0) - tiles
    tl.store(places + expert, begin * ROWS, mask=mask)
    for at in range(tl.max(tiles, 0)):
        tl.store(experts + begin + at, expert, mask=mask & (at < tiles))


@triton.jit
def _sort_kernel(
    ids, pairs, experts, counts, places, num_pairs, num_experts, first_expert, max_tiles,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. Pairs of an expert are in no order: no result depends on it."""
    lane = tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + expert, tl.zeros((EXPERTS,), tl.int32), mask=expert < num_experts)
    for begin in range(0, max_tiles * ROWS, BLOCK):
        tl.store(pairs + begin + lane, tl.full((BLOCK,), 0, tl.int32) + num_pairs, mask=begin + lane < max_tiles * ROWS)
    for begin in range(0, max_tiles, BLOCK):
        tl.store(experts + begin + lane, tl.full((BLOCK,), -1, tl.int32), mask=begin + lane < max_tiles)
    tl.debug_barrier()
    for begin in range(0, num_pairs, BLOCK):
        mine, here = _expert_of(ids, begin + lane, num_pairs, first_expert, num_experts)
        tl.atomic_add(counts + mine, 1, mask=here)
    tl.debug_barrier()
    _plan(counts, places, experts, num_experts, EXPERTS, ROWS)
    tl.debug_barrier()
    for begin in range(0, num_pairs, BLOCK):
        mine, here = _expert_of(ids, begin + lane, num_pairs, first_expert, num_experts)
        at = tl.atomic_add(places + mine, 1, mask=here)
        tl.store(pairs + at, begin + lane, mask=here)


@triton.jit
def _count_kernel(ids, counts, num_pairs, num_experts, first_expert, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine, here = _expert_of(ids, index, num_pairs, first_expert, num_experts)
    tl.atomic_add(counts + mine, 1, mask=here)


@triton.jit
def _plan_kernel(counts, places, experts, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    _plan(counts, places, experts, num_experts, EXPERTS, ROWS)


@triton.jit
def _place_kernel(ids, pairs, places, num_pairs, num_experts, first_expert, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine, here = _expert_of(ids, index, num_pairs, first_expert, num_experts)
    at = tl.atomic_add(places + mine, 1, mask=here)
    tl.store(pairs + at, index, mask=here)


def launch_sort(ids: Tensor, *, num_experts: int, first_expert: int, rows: int) -> Tiles:
    """Sort pairs by expert, in tiles of `rows`.

    Args:
        ids: [tokens, top_k] int32, over all ranks.
        num_experts: on this rank, from `first_expert` on; pairs of others are left out.
    """
    num_pairs, device = ids.numel(), ids.device
    max_tiles = max(1, min(num_pairs, -(-num_pairs // rows) + num_experts))
    scratch = torch.empty((2, num_experts), dtype=torch.int32, device=device)
    counts, places = scratch[0], scratch[1]
    constants = {"EXPERTS": power_of_2(num_experts), "ROWS": rows}
    pairs = torch.empty(max_tiles * rows, dtype=torch.int32, device=device)
    experts = torch.empty(max_tiles, dtype=torch.int32, device=device)
    here = (num_pairs, num_experts, first_expert)
    if num_pairs <= ONE_PROGRAM_PAIRS:
        grid(_sort_kernel, 1)(
            ids, pairs, experts, counts, places, *here, max_tiles, **constants, BLOCK=BLOCK, num_warps=8
        )
        return Tiles(pairs, experts, rows)
    counts.zero_()
    pairs.fill_(num_pairs)
    experts.fill_(-1)
    num_blocks = -(-num_pairs // BLOCK)
    grid(_count_kernel, num_blocks)(ids, counts, *here, BLOCK=BLOCK)
    grid(_plan_kernel, 1)(counts, places, experts, num_experts, **constants)
    grid(_place_kernel, num_blocks)(ids, pairs, places, *here, BLOCK=BLOCK)
    return Tiles(pairs, experts, rows)
