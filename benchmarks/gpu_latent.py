"""Kernel times of latent attention, one layer at DeepSeek-V3's sizes: the section `latent` of `gpu_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from gpu_timing import DEVICE, HALF_TFLOP_S, Result, half, memory_us, time_us

from headrace.attention import _unfolding
from headrace.attention._latent import LatentCache, LatentProjected, LatentSpec
from headrace.attention.latent_triton import LatentTriton
from headrace.attention.port import AttentionStep
from headrace.kernels import _triton_latent, _triton_unfolded
from headrace.kernels._triton_unfolded import Tuning, launch_gather, launch_unfolded
from headrace.kernels._unfolded_work import Work, works_of

SPEC = LatentSpec(num_heads=128, rank=512, rope_dim=64, nope_dim=128, v_dim=128, scale=192**-0.5)
PROMPTS: tuple[tuple[list[int], list[int]], ...] = (
    ([8192], [8192]),
    ([32768], [8192]),
    ([512] * 16, [512] * 16),
    ([8704], [512]),
    ([131072], [8192]),
)
"""(lengths in the cache, tokens of the step) of rows."""
TOO_LONG = 65536
"""Contexts that would take a second or more absorbed."""
ABSORBED_ONLY = (([4096], [1]), ([4096] * 64, [1] * 64))
PRODUCT_TFLOP_S = 790.0
TUNINGS = [
    Tuning(128, 64, 8, 3),
    Tuning(128, 128, 8, 2),
    Tuning(128, 64, 8, 2),
    Tuning(128, 32, 8, 4),
    Tuning(64, 64, 4, 2),
    Tuning(64, 64, 4, 3),
]
ABSORBED_TUNINGS = [(64, 32, 8, 2), (64, 32, 8, 3), (64, 16, 8, 5), (64, 64, 8, 2)]
"""Pairs, keys at a time, warps and stages of the absorbed kernel."""
StepOf = Callable[..., tuple[AttentionStep, int]]


def latent(tune: bool, *, step_of: StepOf) -> Iterator[Result]:
    """Whole attention of prompts, absorbed and unfolded, and of generation; the parts of unfolding; tiles."""
    for lengths, queries in (*PROMPTS, *ABSORBED_ONLY):
        step, num_blocks = step_of(lengths, queries)
        rows = tuple(zip(queries, lengths))
        is_prompt = max(queries) > 1
        step = replace(step, context_rows=rows if is_prompt else ())
        cache = LatentCache(half(num_blocks, step.block_size, SPEC.rank + SPEC.rope_dim))
        packed = _projected(sum(queries))
        shape = f"{len(rows)} x {queries[0]} of {lengths[0]}"
        if max(lengths) < TOO_LONG:
            yield _whole("latent attention, absorbed", shape, rows, packed, cache, replace(step, context_rows=None))
        if tune and not is_prompt:
            for tuning in ABSORBED_TUNINGS:
                with patch.object(_triton_latent, "tuned", lambda *_, tuning=tuning, **__: tuning):
                    yield _whole(f"the same, {tuning}", shape, rows, packed, cache, replace(step, scratch={}))
        if is_prompt:
            yield _whole("latent attention, as divided", shape, rows, packed, cache, step)
            yield from _parts(shape, rows, packed, cache, step, TUNINGS if tune else [None])


def _whole(
    name: str,
    shape: str,
    rows: Sequence[tuple[int, int]],
    packed: LatentProjected,
    cache: LatentCache,
    step: AttentionStep,
) -> Result:
    """The floor is that of the form which has fewer operations."""
    backend, per_pair = LatentTriton(), 2.0 * SPEC.num_heads
    functions = per_pair * (SPEC.nope_dim + SPEC.v_dim) * SPEC.rank / PRODUCT_TFLOP_S / 1e6
    unfolded = per_pair * (SPEC.nope_dim + SPEC.rope_dim + SPEC.v_dim) * _pairs(rows) / HALF_TFLOP_S / 1e6
    absorbed = per_pair * (2 * SPEC.rank + SPEC.rope_dim) * _pairs(rows) / HALF_TFLOP_S / 1e6
    num_kv, num_tokens = sum(kv for _, kv in rows), sum(count for count, _ in rows)
    floor = min(unfolded + functions * num_kv, absorbed + functions * num_tokens)
    floor = max(floor, memory_us(num_kv * (SPEC.rank + SPEC.rope_dim) * 2))
    us = time_us(lambda _: backend.run(packed, cache=cache, step=step, spec=SPEC), 1, at_least=2, repeats=3)
    return Result(name, shape, floor, us)


def _parts(
    shape: str,
    rows: Sequence[tuple[int, int]],
    packed: LatentProjected,
    cache: LatentCache,
    step: AttentionStep,
    tunings: Sequence[Tuning | None],
) -> Iterator[Result]:
    """One group of heads of the step's first batch."""
    divided = _unfolding.divide(rows, SPEC, num_rows=len(rows), item_bytes=2)
    if not divided.unfolded or divided.unfolded[0].segment is not None:
        return
    batch = divided.unfolded[0]
    heads = slice(0, batch.group)
    shape = f"{shape}: {len(batch.rows)} rows, {batch.group} heads"
    (work,) = works_of(batch.rows, _triton_unfolded.tuned(torch.bfloat16).tokens, device=DEVICE)
    vectors = half(work.num_kv, SPEC.rank + SPEC.rope_dim)
    keys, values = half(work.num_kv, batch.group, SPEC.nope_dim), half(work.num_kv, batch.group, SPEC.v_dim)
    us = time_us(
        lambda _: launch_gather(cache.latent, step.block_tables, work, out=vectors, rank=SPEC.rank), 1, repeats=3
    )
    yield Result("gather", shape, memory_us(2 * vectors.nbytes), us)
    latents, up = vectors[:, : SPEC.rank], packed.k_up[heads].flatten(0, 1).t()
    us = time_us(lambda _: torch.mm(latents, up, out=keys.flatten(1)), 1, repeats=3)
    flops = 2.0 * work.num_kv * batch.group * SPEC.nope_dim * SPEC.rank
    yield Result("unfold keys", shape, flops / PRODUCT_TFLOP_S / 1e6, us, f"{flops / us / 1e6:.0f} TFLOP/s")
    q, out = packed.q[:, heads], half(len(packed.q), SPEC.num_heads, SPEC.v_dim)[:, heads]
    pairs = _pairs([(row.num_tokens, row.kv_len) for row in batch.rows])
    flops = 2.0 * batch.group * (SPEC.nope_dim + SPEC.rope_dim + SPEC.v_dim) * pairs
    best: list[tuple[float, object]] = []
    for tuning in tunings:
        tiles = work if tuning is None else works_of(batch.rows, tuning.tokens, device=DEVICE)[0]

        def run(_: int, tuning: Tuning | None = tuning, tiles: Work = tiles) -> None:
            launch_unfolded(q, keys, values, vectors[:, SPEC.rank :], tiles, out=out, scale=SPEC.scale, tuning=tuning)

        best.append((time_us(run, 1, at_least=2, repeats=3), tuning))
    best.sort(key=lambda pair: pair[0])
    rate = f"{flops / best[0][0] / 1e6:.0f} TFLOP/s; "
    note = rate + "; ".join(f"{tuple(t)} {us:.0f}" for us, t in best if isinstance(t, Tuning))
    yield Result("attend unfolded", shape, flops / HALF_TFLOP_S / 1e6, best[0][0], note)


def _projected(num_tokens: int) -> LatentProjected:
    angles = torch.rand(num_tokens, SPEC.rope_dim // 2, device=DEVICE)
    return LatentProjected(
        q=half(num_tokens, SPEC.num_heads, SPEC.nope_dim + SPEC.rope_dim),
        latent=half(num_tokens, SPEC.rank), k_rope=half(num_tokens, SPEC.rope_dim), cos=angles.cos(), sin=angles.sin(),
        k_up=half(SPEC.num_heads, SPEC.nope_dim, SPEC.rank) * SPEC.rank**-0.5,
        v_up=half(SPEC.num_heads, SPEC.v_dim, SPEC.rank) * SPEC.rank**-0.5,
        interleaved=True,
    )  # fmt: skip


def _pairs(rows: Sequence[tuple[int, int]]) -> float:
    """Of a query and a token that it sees."""
    return sum(count * (kv - count) + count * (count + 1) / 2 for count, kv in rows)
