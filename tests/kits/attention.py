"""The contract of an attention backend.

A `World` holds whole histories of some rows: random q, k and v of every token. `World.attend` hands them to a backend
in steps, as an engine would, over a cache whose every entry starts as NaN, through block tables in random order whose
unused entries are invalid ids. The backend owns the cache's layout, so the kit writes nothing to it. The answer is
compared with `World.reference`, dense attention over a row's history in float64.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, AttentionSpec, AttentionStep, LayerCache
from headrace.kernels.rope_write import Projected

INVALID_BLOCK = -1_000_000
NAN = float("nan")

Schedule = Sequence[Sequence[tuple[int, int]]]
"""Steps, each of them (row, tokens of it) in the order in which the rows are packed."""


@dataclass(frozen=True)
class Case:
    """A layer and the lengths of some rows."""

    lengths: tuple[int, ...] = (37, 5, 64)
    block_size: int = 8
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    window: int | None = None
    is_chunked: bool = False
    sink_tokens: int = 0
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_case(seed: int) -> Case:
    """Odd sizes, every option on and off."""
    draw = random.Random(seed)
    block_size = draw.choice([2, 4, 8, 16, 32, 64])
    edges = [1, 2, block_size - 1, block_size, block_size + 1, 31, 32, 33, 65, 90]
    half = draw.random() < 0.3
    return Case(
        lengths=tuple(max(1, draw.choice(edges)) for _ in range(draw.randint(1, 4))),
        block_size=block_size,
        num_kv_heads=draw.choice([1, 2, 3]),
        group=draw.choice([1, 2, 3, 5, 8]),
        head_dim=draw.choice([16, 20, 64, 72, 96, 128, 256]),
        window=draw.choice([None, None, 1, 7, block_size, 40]),
        soft_cap=draw.choice([None, None, 3.0]),
        has_sinks=draw.random() < 0.3,
        is_chunked=draw.random() < 0.3,
        dtype=torch.bfloat16 if half else torch.float32,
        kv_dtype=torch.bfloat16 if half or draw.random() < 0.2 else torch.float32,
        seed=seed,
    )


class World:
    """Random histories of a case, and where a cache holds them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(case.seed)

        def rows(heads: int) -> list[Tensor]:
            shapes = [(length, heads, case.head_dim) for length in case.lengths]
            return [torch.randn(shape, generator=draw).to(case.dtype) for shape in shapes]

        self.q, self.k, self.v = rows(case.num_heads), rows(case.num_kv_heads), rows(case.num_kv_heads)
        self.sinks = torch.randn(case.num_heads, generator=draw) if case.has_sinks else None
        self.scale = 1.7 * case.head_dim**-0.5
        self.tables = block_tables(case.lengths, case.block_size, draw)

    @property
    def spec(self) -> AttentionSpec:
        case = self.case
        return AttentionSpec(
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            scale=self.scale,
            window=case.window,
            is_chunked=case.is_chunked,
            sink_tokens=case.sink_tokens,
            soft_cap=case.soft_cap,
            sinks=self.sinks,
        )

    def new_cache(self, backend: AttentionBackend) -> LayerCache:
        case = self.case
        num_blocks = 1 + sum(-(-length // case.block_size) for length in case.lengths)
        shape = (num_blocks, *backend.block_shape((case.num_kv_heads, case.head_dim), case.block_size))
        return backend.bind({name: torch.full(shape, NAN, dtype=case.kv_dtype) for name in ("k", "v")})

    def step(
        self, rows: Sequence[tuple[int, int]], done: Sequence[int], *, dropped: Sequence[int] = ()
    ) -> AttentionStep:
        """Args:
        rows: (row, tokens of it) in order; `done` says how many tokens of each row came before.
        dropped: rows whose K and V go to the dummy block.
        """
        return packed_step(rows, done, tables=self.tables, block_size=self.case.block_size, dropped=dropped)

    def projected(self, rows: Sequence[tuple[int, int]], done: Sequence[int]) -> Projected:
        """The rows' heads side by side; nothing turns them."""
        heads = torch.cat([self.packed(source, rows, done) for source in (self.q, self.k, self.v)], 1)
        nothing = torch.empty(len(heads), 0)
        return Projected(heads.flatten(1), self.case.num_heads, self.case.num_kv_heads, nothing, nothing)

    def packed(self, source: list[Tensor], rows: Sequence[tuple[int, int]], done: Sequence[int]) -> Tensor:
        return torch.cat([source[row][done[row] : done[row] + count] for row, count in rows])

    def attend(
        self,
        backend: AttentionBackend,
        schedule: Schedule,
        *,
        cache: LayerCache | None = None,
        dropped: Sequence[int] = (),
    ) -> list[Tensor]:
        """Run the schedule from an empty cache. -> what each row's scheduled tokens got, [tokens, heads, dim]"""
        cache = cache or self.new_cache(backend)
        done = [0] * len(self.case.lengths)
        outputs: list[list[Tensor]] = [[] for _ in done]
        for rows in schedule:
            step = self.step(rows, done, dropped=dropped)
            backend.plan(step)
            act = backend.run(self.projected(rows, done), cache=cache, step=step, spec=self.spec)
            assert act.scales is None and act.data.dtype == self.case.dtype
            out = act.data.unflatten(-1, (self.case.num_heads, self.case.head_dim))
            for (row, count), part in zip(rows, out.split([count for _, count in rows]), strict=True):
                outputs[row].append(part)
                done[row] += count
        nothing = torch.empty(0, self.case.num_heads, self.case.head_dim, dtype=self.case.dtype)
        return [torch.cat([nothing, *parts]) for parts in outputs]

    def reference(self, row: int) -> Tensor:
        """[length, heads, dim] float64"""
        case, length = self.case, self.case.lengths[row]
        q = self.q[row].double().transpose(0, 1)
        k, v = (
            source[row].to(case.kv_dtype).double().transpose(0, 1).repeat_interleave(case.group, 0)
            for source in (self.k, self.v)
        )
        scores = q @ k.transpose(1, 2) * self.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        reach = case.window or length
        in_reach = distance < reach
        if case.is_chunked:
            in_reach = torch.arange(length)[:, None] // reach == torch.arange(length)[None, :] // reach
        in_reach |= torch.arange(length)[None, :] < case.sink_tokens
        seen = (distance >= 0) & in_reach
        weights = scores.masked_fill(~seen, -torch.inf).exp()  # scores are small enough without a maximum
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + self.sinks.double().exp()[:, None, None]
        return (weights / total @ v).transpose(0, 1)


def packed_step(
    rows: Sequence[tuple[int, int]],
    done: Sequence[int],
    *,
    tables: Tensor,
    block_size: int,
    dropped: Sequence[int] = (),
) -> AttentionStep:
    """Some tokens of some rows, as `World.step`. tables: [all rows, max_blocks]"""
    known = tables
    tables = torch.full((len(rows), known.shape[1] + 1), INVALID_BLOCK, dtype=torch.int32)
    starts, lens, positions, slots = [0], [], [], []
    for place, (row, count) in enumerate(rows):
        first, last = done[row], done[row] + count
        num_blocks = -(-last // block_size)
        tables[place, :num_blocks] = known[row, :num_blocks]
        starts.append(starts[-1] + count)
        lens.append(last)
        positions += range(first, last)
        slots += [
            0 if row in dropped else int(known[row, token // block_size]) * block_size + token % block_size
            for token in range(first, last)
        ]
    num_context = max((place + 1 for place, (_, count) in enumerate(rows) if count != 1), default=0)
    return AttentionStep(
        block_size=block_size,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int64),
        block_tables=tables,
        write_slots=torch.tensor(slots, dtype=torch.int64),
        max_query=max(count for _, count in rows),
        max_kv=max(lens),
        num_context_rows=num_context,
        context_rows=tuple((count, done[row] + count) for row, count in rows[:num_context]),
    )


def block_tables(lengths: Sequence[int], block_size: int, draw: torch.Generator) -> Tensor:
    """Distinct blocks in random order, never the dummy. [rows, max_blocks]"""
    counts = [-(-length // block_size) for length in lengths]
    ids = (1 + torch.randperm(sum(counts), generator=draw)).split(counts)
    tables = torch.full((len(lengths), max(counts)), INVALID_BLOCK, dtype=torch.int32)
    for row, blocks in enumerate(ids):
        tables[row, : len(blocks)] = blocks
    return tables


def whole(case: Case) -> Schedule:
    """Every row at once."""
    return [[(row, length) for row, length in enumerate(case.lengths)]]


def chunked(case: Case, chunk: int, *, rows: Sequence[int] | None = None) -> Schedule:
    """Every row in chunks, side by side."""
    left = {row: case.lengths[row] for row in (range(len(case.lengths)) if rows is None else rows)}
    steps: list[list[tuple[int, int]]] = []
    while any(left.values()):
        steps.append([(row, min(chunk, count)) for row, count in left.items() if count])
        left = {row: count - min(chunk, count) for row, count in left.items()}
    return steps


def shuffled(lengths: Sequence[int], block_size: int, seed: int) -> Schedule:
    """Chunks of random sizes, decode steps among them, rows in random order."""
    draw = random.Random(seed)
    left = list(lengths)
    steps: list[list[tuple[int, int]]] = []
    while any(left):
        rows = [row for row, count in enumerate(left) if count and draw.random() < 0.7]
        draw.shuffle(rows)
        step = [(row, min(left[row], draw.choice([1, 1, 2, block_size, 50]))) for row in rows]
        for row, count in step:
            left[row] -= count
        if step:
            steps.append(step)
    return steps


def assert_close(world: World, outputs: list[Tensor]) -> None:
    tolerance = 0.02 if world.case.dtype == torch.bfloat16 else 2e-5
    for row, out in enumerate(outputs):
        torch.testing.assert_close(out.double(), world.reference(row)[: len(out)], atol=tolerance, rtol=tolerance)


def check_reference(backend: AttentionBackend, case: Case) -> None:
    """Any mix of chunks and decode rows gives what dense attention over the history gives."""
    world = World(case)
    assert_close(world, world.attend(backend, shuffled(case.lengths, case.block_size, case.seed)))


def check_dropped_rows(backend: AttentionBackend) -> None:
    """Rows that write to the dummy block leave the others alone, though their own context is NaN."""
    case = Case(lengths=(20, 9, 12))
    world = World(case)
    outputs = world.attend(backend, chunked(case, 4), dropped=(1,))
    for row in (0, 2):
        torch.testing.assert_close(outputs[row].double(), world.reference(row), atol=2e-5, rtol=2e-5)


def check_released_blocks(backend: AttentionBackend) -> None:
    """Blocks that have left the window may be gone: their table entries are never used."""
    case = Case(lengths=(70,), block_size=4, window=9)
    world = World(case)
    cache = world.new_cache(backend)
    out = torch.cat([*world.attend(backend, [[(0, 50)]], cache=cache)])
    tables = world.tables.clone()
    for token in range(50, 70):
        world.tables[0, : max(0, token - 8) // 4] = INVALID_BLOCK
        step = world.step([(0, 1)], [token])
        backend.plan(step)
        act = backend.run(world.projected([(0, 1)], [token]), cache=cache, step=step, spec=world.spec)
        out = torch.cat([out, act.data.view(1, case.num_heads, case.head_dim)])
    world.tables = tables
    assert_close(world, [out])


def check_copied_blocks(backend: AttentionBackend) -> None:
    """A row whose blocks were copied elsewhere continues from the copies."""
    case = Case(lengths=(21,), block_size=4)
    world = World(case)
    cache = world.new_cache(backend)
    source = world.tables[0].long()
    grown = LayerCache(*(torch.cat([part, torch.full_like(part, NAN)]) for part in (cache.k, cache.v)))
    world.attend(backend, [[(0, 20)]], cache=grown)
    copies = source.flip(0) + len(source)
    for part in (grown.k, grown.v):
        part[copies] = part[source]
    world.tables = copies.to(torch.int32)[None]
    step = world.step([(0, 1)], [20])
    backend.plan(step)
    act = backend.run(world.projected([(0, 1)], [20]), cache=grown, step=step, spec=world.spec)
    out = act.data.view(1, case.num_heads, case.head_dim)
    torch.testing.assert_close(out.double(), world.reference(0)[20:], atol=2e-5, rtol=2e-5)


def check_strided_projection(backend: AttentionBackend) -> None:
    """The projection may be a part of a wider tensor."""
    case = Case(lengths=(13, 6))
    world = World(case)
    step = world.step(whole(case)[0], [0, 0])
    packed = world.projected(whole(case)[0], [0, 0])
    wide = torch.cat([packed.qkv, packed.qkv], 1)
    backend.plan(step)
    act = backend.run(
        replace(packed, qkv=wide[:, : packed.qkv.shape[1]]),
        cache=world.new_cache(backend),
        step=step,
        spec=world.spec,
    )
    assert_close(world, list(act.data.unflatten(-1, (case.num_heads, case.head_dim)).split(list(case.lengths))))


def check_same_bits(backend: AttentionBackend, case: Case) -> None:
    """A query's bits depend on its row's history only: not on chunks, neighbours, block tables or their order."""
    world = World(case)
    expected = world.attend(backend, whole(case))
    size = case.block_size
    for chunk in (1, 3, size, size + 1):
        assert_same(world.attend(backend, chunked(case, chunk)), expected)
    assert_same(world.attend(backend, shuffled(case.lengths, case.block_size, case.seed + 1)), expected)
    for row in range(len(case.lengths)):
        assert_same([world.attend(backend, chunked(case, 7, rows=[row]))[row]], [expected[row]])
    world.tables = block_tables(case.lengths, size, torch.Generator().manual_seed(case.seed + 1))
    assert_same(world.attend(backend, chunked(case, 5)), expected)
    other_size = World(replace(case, block_size=2 * size))
    assert_same(other_size.attend(backend, chunked(case, 6)), expected)


def assert_same(outputs: list[Tensor], expected: list[Tensor]) -> None:
    for row, (out, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(out, wanted), f"row {row} differs by {(out.float() - wanted.float()).abs().max():.1e}"
