"""The GPU backend of latent attention: Triton kernels over paged latents. Lengths are read on the device, so steps can
be captured, as with those of attention over heads; where the host knows them too, long prompts are unfolded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention._latent import IndexProjected, LatentCache, LatentProjected, LatentSpec
from headrace.attention._layout import BlockLayout
from headrace.attention._unfolding import CAPTURE_SAVES_US, Batch, divide, step_saves_us
from headrace.attention.port import AttentionStep, CacheSpec
from headrace.kernels._triton_chain import shared_bytes
from headrace.kernels._triton_index import launch_index_choice
from headrace.kernels._triton_latent import launch_latent, plan_latent
from headrace.kernels._triton_latent_parts import LatentPlan
from headrace.kernels._triton_latent_write import launch_latent_write
from headrace.kernels._triton_unfolded import launch_gather, launch_unfolded, new_carry, tuned
from headrace.kernels._unfolded_work import Work, works_of
from headrace.kernels.quantise import PLAIN, Form, Quantised, quantise

__all__ = ["LatentTriton"]


@dataclass(frozen=True, slots=True)
class Division:
    """Of a step's rows among the two forms, for all layers of a group."""

    unfolded: tuple[tuple[Batch, tuple[Work, ...]], ...]
    """With a work a segment."""
    absorbed: tuple[tuple[tuple[int, int], slice], ...]
    """[first, end) of rows, and their tokens among the packed ones."""


class LatentTriton(BlockLayout):
    """Rows that generate are attended to absorbed, and so are prompts that it costs less for, or whose lengths only
    the device knows. An FP8 cache holds vectors as they are (scale 1)."""

    kind: ClassVar[str] = "latent"

    def bind(self, regions: Mapping[str, Tensor]) -> LatentCache:
        """Latents, [blocks, block_size, dim]."""
        return LatentCache(**regions)

    def wants_lengths(self, context_rows: Sequence[tuple[int, int]], spec: CacheSpec) -> bool:
        """Where unfolding saves more than a graph does."""
        assert isinstance(spec, LatentSpec)
        return step_saves_us(context_rows, spec) > CAPTURE_SAVES_US

    def run(
        self,
        packed: LatentProjected,
        *,
        cache: LatentCache,
        step: AttentionStep,
        spec: LatentSpec,
        form: Form = PLAIN,
    ) -> Quantised:
        """Write the latents, attend causally. -> [tokens, heads * v_dim]"""
        q, index = packed.q, packed.index
        assert index is None or isinstance(index, IndexProjected)
        launch_latent_write(
            q, packed.latent, packed.k_rope, packed.cos, packed.sin, cache.latent, step.write_slots,
            interleaved=packed.interleaved,
            index_k=None if index is None else index.k, index_keys=cache.index_keys,
        )  # fmt: skip
        chosen = self._chosen(packed, cache, step, spec)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_dim)
        division = _division(step, spec, q, is_chosen=chosen is not None)
        for batch, works in division.unfolded:
            _unfolded(packed, cache, step, spec, batch=batch, works=works, out=out)
        for rows, tokens in division.absorbed:
            _absorbed(packed, cache, step, spec, rows=rows, tokens=tokens, chosen=chosen, out=out)
        flat = out.flatten(1)
        return Quantised(flat) if form.is_plain else quantise(flat, form)

    @staticmethod
    def _chosen(packed: LatentProjected, cache: LatentCache, step: AttentionStep, spec: LatentSpec) -> Tensor | None:
        """What queries see, chosen here or by a layer before; None is everything."""
        if packed.choice is None:
            return None
        if packed.index is not None:
            assert spec.index is not None and cache.index_keys is not None and isinstance(packed.index, IndexProjected)
            packed.choice.positions = launch_index_choice(
                packed.index.q, packed.index.weights, cache.index_keys, step,
                top=spec.index.top, scale=spec.index.dim**-0.5, max_query=step.max_query, max_kv=step.max_kv,
            )  # fmt: skip
        assert packed.choice.positions is not None, "no layer before has chosen"
        return packed.choice.positions


def _division(step: AttentionStep, spec: LatentSpec, q: Tensor, *, is_chosen: bool) -> Division:
    num_rows, num_tokens = step.kv_lens.shape[0], q.shape[0]
    if is_chosen or step.context_rows is None:
        return Division((), (((0, num_rows), slice(0, num_tokens)),))
    key = f"unfolded {spec.num_heads} {spec.rank} {spec.rope_dim} {spec.nope_dim} {spec.v_dim} {spec.window}"
    if key not in step.scratch:
        parts = divide(step.context_rows, spec, num_rows=num_rows, item_bytes=q.element_size())
        tokens = tuned(q.dtype, room=shared_bytes(q.device)).tokens
        works = [works_of(each.rows, tokens, segment=each.segment, device=q.device) for each in parts.unfolded]
        starts = [0, *accumulate(count for count, _ in step.context_rows)]
        starts += range(starts[-1] + 1, num_tokens + 1)  # of rows that generate
        absorbed = tuple((rows, slice(starts[rows[0]], starts[rows[1]])) for rows in parts.absorbed)
        step.scratch[key] = Division(tuple(zip(parts.unfolded, works)), absorbed)
    return step.scratch[key]


def _unfolded(
    packed: LatentProjected,
    cache: LatentCache,
    step: AttentionStep,
    spec: LatentSpec,
    *,
    batch: Batch,
    works: tuple[Work, ...],
    out: Tensor,
) -> None:
    """Attend the rows of a batch, some heads at a time. out: [tokens, heads, v_dim], to write to."""
    num_kv = max(work.num_kv for work in works)
    vectors = out.new_empty(num_kv, spec.rank + spec.rope_dim)
    room = out.new_empty(num_kv * batch.group * (spec.nope_dim + spec.v_dim))
    carry = None
    if len(works) > 1:
        carry = new_carry(out, works[0], num_heads=batch.group, v_dim=spec.v_dim)
    for first in range(0, spec.num_heads, batch.group):
        heads = slice(first, min(first + batch.group, spec.num_heads))
        for work in works:
            known = vectors[: work.num_kv]
            if first == 0 or len(works) > 1:
                launch_gather(cache.latent, step.block_tables, work, out=known, rank=spec.rank)
            latents, turned = known.split((spec.rank, spec.rope_dim), 1)
            keys, rest = _by_head(latents, packed.k_up[heads], room)
            values, _ = _by_head(latents, packed.v_up[heads], rest)
            launch_unfolded(
                packed.q[:, heads], keys, values, turned, work, out=out[:, heads], scale=spec.scale, carry=carry
            )


def _by_head(latents: Tensor, up: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """latents: [kv, rank], up: [heads, dim, rank] -> ([kv, heads, dim] at the beginning of the room, the rest of it)"""
    num_heads, dim = up.shape[:2]
    size = len(latents) * num_heads * dim
    unfolded = room[:size].view(len(latents), num_heads * dim)
    torch.mm(latents, up.flatten(0, 1).t(), out=unfolded)
    return unfolded.unflatten(1, (num_heads, dim)), room[size:]


def _absorbed(
    packed: LatentProjected,
    cache: LatentCache,
    step: AttentionStep,
    spec: LatentSpec,
    *,
    rows: tuple[int, int],
    tokens: slice,
    chosen: Tensor | None,
    out: Tensor,
) -> None:
    """Attend these rows, keys' and values' functions absorbed. out: [all tokens, heads, v_dim], to write to."""
    q = packed.q[tokens]
    absorbed = q.new_empty(q.shape[0], spec.num_heads, spec.rank)
    torch.bmm(q[..., : spec.nope_dim].transpose(0, 1), packed.k_up, out=absorbed.transpose(0, 1))
    attended = torch.empty_like(absorbed)
    common = {
        "out": attended, "scale": spec.scale, "window": spec.window, "sink_tokens": spec.sink_tokens,
        "chosen": chosen, "first_token": tokens.start,
    }  # fmt: skip
    middle = max(step.num_context_rows, rows[0])
    launch_latent(
        absorbed, packed.q, cache.latent, step, rows=(rows[0], min(middle, rows[1])), max_query=step.max_query, **common
    )
    if middle < rows[1]:
        plan = _decode_plan(step, spec, q, top=None if chosen is None else chosen.shape[1])
        launch_latent(absorbed, packed.q, cache.latent, step, rows=(middle, rows[1]), max_query=1, plan=plan, **common)
    torch.bmm(attended.transpose(0, 1), packed.v_up.transpose(1, 2), out=out[tokens].transpose(0, 1))


def _decode_plan(step: AttentionStep, spec: LatentSpec, q: Tensor, *, top: int | None) -> LatentPlan:
    key = f"latent {spec.num_heads} {spec.rank} {top}"
    if key not in step.scratch:
        max_kv = step.max_kv if top is None else min(step.max_kv, top)
        if spec.window is not None and not spec.sink_tokens:
            max_kv = min(max_kv, spec.window + step.block_size)
        step.scratch[key] = plan_latent(
            step.kv_lens.shape[0] - step.num_context_rows, spec.num_heads, spec.rank,
            dtype=q.dtype, max_kv=max_kv, device=q.device,
        )  # fmt: skip
    return step.scratch[key]
