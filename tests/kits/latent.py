"""The contract of a backend of latent attention, as `tests.kits.attention` has it for attention over heads.

The reference unfolds keys and values of all heads, in float64, which no backend does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.attention import _unfolding
from headrace.attention._latent import Choice, IndexProjected, IndexSpec, LatentCache, LatentProjected, LatentSpec
from headrace.attention.port import AttentionStep
from headrace.kernels.rope import apply_rope_twin
from tests.kits.attention import INVALID_BLOCK, NAN, Schedule, block_tables, packed_step, shuffled

INDEX_HEADS = 20
"""So many that hardly a score is exactly zero, as another may be."""


@dataclass(frozen=True)
class Case:
    """A layer and the lengths of some rows."""

    lengths: tuple[int, ...] = (37, 5, 64)
    block_size: int = 8
    num_heads: int = 3
    rank: int = 16
    rope_dim: int = 6
    nope_dim: int = 10
    v_dim: int = 12
    interleaved: bool = True
    window: int | None = None
    sink_tokens: int = 0
    top: int | None = None
    """Tokens that an indexer chooses."""
    index_dim: int = 10
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    seed: int = 0


def random_case(seed: int) -> Case:
    """Odd sizes, every option on and off."""
    draw = random.Random(seed)
    block_size = draw.choice([2, 4, 8, 16, 32])
    edges = [1, 2, block_size - 1, block_size, block_size + 1, 31, 33, 65, 90]
    top = draw.choice([None, 5, 16, 40])
    half = top is None and draw.random() < 0.3  # what an indexer chooses hangs on the last bit
    return Case(
        lengths=tuple(max(1, draw.choice(edges)) for _ in range(draw.randint(1, 4))),
        block_size=block_size,
        num_heads=draw.choice([1, 3, 16, 20]),
        rank=draw.choice([16, 24, 64, 128]),
        rope_dim=draw.choice([0, 4, 6, 16, 64]),
        nope_dim=draw.choice([8, 10, 32]),
        v_dim=draw.choice([8, 12, 32]),
        interleaved=draw.random() < 0.5,
        window=draw.choice([None, None, 1, 7, 40]) if top is None else None,
        sink_tokens=draw.choice([0, 0, 5]),
        top=top,
        dtype=torch.bfloat16 if half else torch.float32,
        kv_dtype=torch.bfloat16 if half else torch.float32,
        seed=seed,
    )


class World:
    """Random histories of a case, and where a cache holds them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(case.seed)

        def rows(*shape: int) -> list[Tensor]:
            return [torch.randn((length, *shape), generator=draw).to(case.dtype) for length in case.lengths]

        self.q = rows(case.num_heads, case.nope_dim + case.rope_dim)
        self.latent, self.k_rope = rows(case.rank), rows(case.rope_dim)
        self.index_q, self.index_k = rows(INDEX_HEADS, case.index_dim), rows(case.index_dim)
        self.index_weights = [value.float() for value in rows(INDEX_HEADS)]
        spread = case.rank**-0.5  # keys and values of about 1 at any rank
        self.k_up = (torch.randn(case.num_heads, case.nope_dim, case.rank, generator=draw) * spread).to(case.dtype)
        self.v_up = (torch.randn(case.num_heads, case.v_dim, case.rank, generator=draw) * spread).to(case.dtype)
        self.tables = block_tables(case.lengths, case.block_size, draw)

    @property
    def spec(self) -> LatentSpec:
        case = self.case
        index = None if case.top is None else IndexSpec(INDEX_HEADS, case.index_dim, case.top)
        return LatentSpec(
            num_heads=case.num_heads, rank=case.rank, rope_dim=case.rope_dim, nope_dim=case.nope_dim,
            v_dim=case.v_dim, scale=1.3 * (case.nope_dim + case.rope_dim) ** -0.5,
            window=case.window, sink_tokens=case.sink_tokens, index=index,
        )  # fmt: skip

    def new_cache(self, backend: Any) -> LatentCache:
        case = self.case
        num_blocks = 1 + sum(-(-length // case.block_size) for length in case.lengths)
        return backend.bind(
            {
                region.name: torch.full(
                    (num_blocks, *backend.block_shape(region.shape, case.block_size)), NAN, dtype=case.kv_dtype
                )
                for region in self.spec.regions("")
            }
        )

    def step(
        self, rows: Sequence[tuple[int, int]], done: Sequence[int], *, dropped: Sequence[int] = ()
    ) -> AttentionStep:
        """As `tests.kits.attention.World.step`."""
        return packed_step(rows, done, tables=self.tables, block_size=self.case.block_size, dropped=dropped)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [tokens, rope_dim / 2]"""
        frequencies = 100.0 ** -(torch.arange(self.case.rope_dim // 2) / (self.case.rope_dim // 2))
        angles = positions[:, None] * frequencies
        return angles.cos(), angles.sin()

    def projected(
        self, rows: Sequence[tuple[int, int]], done: Sequence[int], *, choice: Choice | None = None
    ) -> LatentProjected:
        """Args: choice: what a layer before chose; otherwise this one chooses, where it has an indexer."""

        def packed(source: list[Tensor]) -> Tensor:
            return torch.cat([source[row][done[row] : done[row] + count] for row, count in rows])

        cos, sin = self.turns(torch.cat([torch.arange(done[row], done[row] + count) for row, count in rows]))
        index = None
        if choice is None and self.case.top is not None:
            choice = Choice()
            index = IndexProjected(packed(self.index_q), packed(self.index_k), packed(self.index_weights))
        return LatentProjected(
            q=packed(self.q), latent=packed(self.latent), k_rope=packed(self.k_rope), cos=cos, sin=sin,
            k_up=self.k_up, v_up=self.v_up, interleaved=self.case.interleaved, index=index, choice=choice,
        )  # fmt: skip

    def attend(
        self,
        backend: Any,
        schedule: Schedule,
        *,
        cache: LatentCache | None = None,
        done: Sequence[int] | None = None,
        dropped: Sequence[int] = (),
    ) -> list[Tensor]:
        """Run the schedule. -> what each row's scheduled tokens got, [tokens, heads, v_dim]"""
        cache = cache or self.new_cache(backend)
        done = [0] * len(self.case.lengths) if done is None else list(done)
        nothing = torch.empty(0, self.case.num_heads, self.case.v_dim, dtype=self.case.dtype)
        outputs = [[nothing] for _ in done]
        for rows in schedule:
            step = self.step(rows, done, dropped=dropped)
            backend.plan(step)
            act = backend.run(self.projected(rows, done), cache=cache, step=step, spec=self.spec)
            assert act.scales is None and act.data.dtype == self.case.dtype
            out = act.data.unflatten(-1, (self.case.num_heads, self.case.v_dim))
            for (row, count), part in zip(rows, out.split([count for _, count in rows]), strict=True):
                outputs[row].append(part)
                done[row] += count
        return [torch.cat(parts) for parts in outputs]

    def reference(self, row: int, *, choice: Tensor | None = None) -> Tensor:
        """[length, heads, v_dim] float64. choice: bool [length, length], what an indexer chose."""
        case, length = self.case, self.case.lengths[row]
        cos, sin = self.turns(torch.arange(length))
        q_rope, k_rope = apply_rope_twin(
            self.q[row][..., case.nope_dim :], self.k_rope[row][:, None], cos, sin, interleaved=case.interleaved
        )
        stored = torch.cat((self.latent[row], k_rope[:, 0]), -1).to(case.kv_dtype).double()
        latent, k_rope = stored.split((case.rank, case.rope_dim), -1)
        keys = torch.einsum("tr,hnr->thn", latent, self.k_up.double())
        values = torch.einsum("tr,hvr->thv", latent, self.v_up.double())
        scores = torch.einsum("qhn,khn->hqk", self.q[row][..., : case.nope_dim].double(), keys)
        scores = (scores + torch.einsum("qhr,kr->hqk", q_rope.double(), k_rope)) * self.spec.scale
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (distance >= 0) & ((distance < (case.window or length)) | (torch.arange(length) < case.sink_tokens))
        if choice is None and case.top is not None:
            choice = self.best(row)
        if choice is not None:
            seen &= choice
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khv->qhv", weights, values)

    def best(self, row: int) -> Tensor:
        """bool [length, length]: what the indexer chooses."""
        case, length = self.case, self.case.lengths[row]
        assert case.top is not None
        keys = self.index_k[row].to(case.kv_dtype).double()
        hits = (torch.einsum("qhd,kd->qhk", self.index_q[row].double(), keys) * case.index_dim**-0.5).relu()
        scores = torch.einsum("qhk,qh->qk", hits, self.index_weights[row].double())
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        places = scores.topk(min(case.top, length), -1).indices
        return torch.zeros(length, length, dtype=torch.bool).scatter_(1, places, True)


def pretend_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are unfolded, however short."""
    monkeypatch.setattr(_unfolding, "PRODUCT_TFLOP_S", 1e12)
    monkeypatch.setattr(_unfolding, "UNFOLDED_TFLOP_S", 1e12)
    monkeypatch.setattr(_unfolding, "MIN_SAVED_US", 0.0)


def assert_close(world: World, outputs: list[Tensor], *, done: Sequence[int] | None = None) -> None:
    tolerance = 0.07 if world.case.dtype == torch.bfloat16 else 2e-5
    for row, out in enumerate(outputs):
        first = 0 if done is None else done[row]
        expected = world.reference(row)[first : first + len(out)]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def chunks(case: Case, size: int) -> Schedule:
    """Every row in chunks, side by side."""
    steps = []
    for at in range(0, max(case.lengths), size):
        steps.append([(row, min(size, length - at)) for row, length in enumerate(case.lengths) if length > at])
    return steps


def check_reference(backend: Any, case: Case) -> None:
    """Any mix of chunks and decode rows gives what dense attention over unfolded keys and values gives."""
    world = World(case)
    assert_close(world, world.attend(backend, shuffled(case.lengths, case.block_size, case.seed)))


def check_dropped_rows(backend: Any) -> None:
    """Rows that write to the dummy block leave the others alone, though their own context is NaN."""
    for top in (None, 5):
        case = Case(lengths=(10, 6, 7), block_size=4, top=top)
        world = World(case)
        outputs = world.attend(backend, chunks(case, 5), dropped=(1,))
        for row in (0, 2):
            torch.testing.assert_close(outputs[row].double(), world.reference(row), atol=2e-5, rtol=2e-5)


def check_released_blocks(backend: Any) -> None:
    """Blocks that have left the window may be gone: their table entries are never used."""
    case = Case(lengths=(24,), block_size=4, window=9)
    world = World(case)
    cache = world.new_cache(backend)
    out = world.attend(backend, [[(0, 20)]], cache=cache)[0]
    for token in range(20, 24):
        world.tables[0, : max(0, token - 8) // 4] = INVALID_BLOCK
        out = torch.cat([out, world.attend(backend, [[(0, 1)]], cache=cache, done=[token])[0]])
    assert_close(world, [out])


def check_copied_blocks(backend: Any) -> None:
    """A row whose blocks were copied elsewhere continues from the copies, the indexer too."""
    case = Case(lengths=(21,), block_size=4, top=6)
    world = World(case)
    cache = world.new_cache(backend)
    assert cache.index_keys is not None
    grown = LatentCache(*(torch.cat([part, torch.full_like(part, NAN)]) for part in (cache.latent, cache.index_keys)))
    world.attend(backend, [[(0, 20)]], cache=grown)
    source = world.tables[0].long()
    copies = source.flip(0) + len(source)
    for part in (grown.latent, grown.index_keys):
        assert part is not None
        part[copies] = part[source]
        part[source] = NAN
    world.tables = copies.to(torch.int32)[None]
    assert_close(world, world.attend(backend, [[(0, 1)]], cache=grown, done=[20]), done=[20])


def check_shared_choice(backend: Any) -> None:
    """A layer without an indexer sees what one before it chose; positions may come in any order."""
    case = Case(lengths=(24,), block_size=4)
    world = World(case)
    draw = torch.Generator().manual_seed(3)
    marks = torch.zeros(24, 24, dtype=torch.bool)
    positions = torch.full((24, 7), -1)
    for token in range(24):
        some = torch.randperm(token + 1, generator=draw)[:7]
        positions[token, : len(some)] = some
        marks[token, some] = True
    cache = world.new_cache(backend)
    expected = world.reference(0, choice=marks)
    for count, done in ((19, 0), (1, 19), (4, 20)):
        step = world.step([(0, count)], [done])
        backend.plan(step)
        given = world.projected([(0, count)], [done], choice=Choice(positions[done : done + count]))
        act = backend.run(given, cache=cache, step=step, spec=world.spec)
        got = act.data.unflatten(-1, (case.num_heads, case.v_dim)).double()
        torch.testing.assert_close(got, expected[done : done + count], atol=2e-5, rtol=2e-5)


def check_strided_projection(backend: Any) -> None:
    """Latents and keys may be parts of a wider tensor."""
    case = Case(lengths=(13, 6))
    world = World(case)
    rows = list(enumerate(case.lengths))
    packed = world.projected(rows, [0, 0])
    wide = torch.cat((packed.latent, packed.k_rope), 1)
    step = world.step(rows, [0, 0])
    backend.plan(step)
    parts = replace(packed, latent=wide[:, : case.rank], k_rope=wide[:, case.rank :])
    act = backend.run(parts, cache=world.new_cache(backend), step=step, spec=world.spec)
    assert_close(world, list(act.data.unflatten(-1, (case.num_heads, case.v_dim)).split(list(case.lengths))))
