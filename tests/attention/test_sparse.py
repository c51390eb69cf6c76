"""Sparse attention on a GPU's kernels beside the torch ones: choices, results and whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.attention._sparse import SparseCache, SparseProjected, SparseSpec
from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.attention.sparse_torch import SparseTorch
from headrace.attention.sparse_triton import SparseTriton
from headrace.hub.source import resolve_model
from headrace.kernels.block_choice import BlockIndexSpec, block_choice
from headrace.kernels.rope_write import Projected
from tests.kits.interpreter import DEVICES
from tests.kits.model import Row, Sequences, assert_close, load_model, prompt, save_tiny

DIM, INDEX_DIM, BLOCK_SIZE = 24, 10, 4
LENGTHS, QUERIES = (13, 1, 14, 22), (4, 1, 14, 1)
"""Tokens in the cache and in the step; a whole prompt, a chunk, and rows of one token."""


def made(spec: SparseSpec, device: str) -> tuple[SparseProjected, SparseCache, AttentionStep]:
    draw = torch.Generator().manual_seed(3)
    counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    free = (torch.randperm(sum(counts), generator=draw) + 1).tolist()
    tables = torch.full((len(counts), max(counts)), -1_000_000, dtype=torch.int32)
    for table, count in zip(tables, counts):
        table[:count] = torch.tensor([free.pop() for _ in range(count)])
    places = [(row, at) for row, (n, m) in enumerate(zip(LENGTHS, QUERIES)) for at in range(n - m, n)]
    tokens, heads = len(places), spec.heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device)

    step = AttentionStep(
        block_size=BLOCK_SIZE,
        query_starts=torch.tensor([0, *QUERIES]).cumsum(0).int().to(device),
        kv_lens=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        positions=torch.tensor([at for _, at in places], device=device),
        block_tables=tables.to(device),
        write_slots=torch.tensor(
            [int(tables[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for row, at in places], device=device
        ),
        max_query=max(QUERIES),
        max_kv=max(LENGTHS),
        num_context_rows=3,
    )
    width = (heads.num_heads + 2 * heads.num_kv_heads) * DIM
    packed = Projected(random(tokens, width), heads.num_heads, heads.num_kv_heads, random(tokens, 4), random(tokens, 4))
    projected = SparseProjected(packed, random(tokens, heads.num_kv_heads, INDEX_DIM), random(tokens, INDEX_DIM))
    shape = (1 + sum(counts), heads.num_kv_heads, BLOCK_SIZE, DIM)
    cache = SparseCache(LayerCache(random(*shape), random(*shape)), random(1 + sum(counts), BLOCK_SIZE, INDEX_DIM))
    return projected, cache, step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "index",
    [
        BlockIndexSpec(INDEX_DIM, 3, 4, 1, first=2),
        pytest.param(BlockIndexSpec(INDEX_DIM, 3, 3, 1), marks=pytest.mark.slow),
        pytest.param(BlockIndexSpec(INDEX_DIM, 5, 2, 0), marks=pytest.mark.slow),
        pytest.param(BlockIndexSpec(INDEX_DIM, 16, 9, 2), marks=pytest.mark.slow),
    ],
)
def test_the_kernels_equal_torch(index: BlockIndexSpec, device: str) -> None:
    spec = SparseSpec(AttentionSpec(6, 2, DIM, DIM**-0.5), index)
    got = [backend.run(packed, cache=cache, step=step, spec=spec).data
           for backend in (SparseTorch(), SparseTriton()) for packed, cache, step in [made(spec, device)]]  # fmt: skip
    torch.testing.assert_close(got[1], got[0], rtol=1e-4, atol=1e-5)


def test_what_was_not_chosen_is_not_read() -> None:
    """Keys and values of other blocks are NaN, which would show."""
    spec = SparseSpec(AttentionSpec(6, 2, DIM, DIM**-0.5), BlockIndexSpec(INDEX_DIM, BLOCK_SIZE, 2, 1))
    packed, cache, step = made(spec, "cpu")
    SparseTriton().run(made(spec, "cpu")[0], cache=cache, step=step, spec=spec)  # writes this step's keys
    chosen = block_choice(packed.index_q, cache.index_keys, step, spec.index)
    seen = {
        (int(step.block_tables[row, number]), head)
        for token, row in enumerate(torch.arange(4).repeat_interleave(torch.tensor(QUERIES)).tolist())
        for head in range(2)
        for number in chosen[token, head].tolist()
        if number >= 0
    }
    assert len(seen) < 2 * (cache.heads.k.shape[0] - 1), "some block isn't chosen by any query"
    written = {(int(slot) // BLOCK_SIZE, head) for slot in step.write_slots for head in range(2)}
    for block in range(cache.heads.k.shape[0]):
        for head in range(2):
            if (block, head) not in seen | written:
                cache.heads.k[block, head] = cache.heads.v[block, head] = torch.nan
    assert torch.isfinite(SparseTriton().run(packed, cache=cache, step=step, spec=spec).data).all()


@pytest.mark.slow
def test_whole_logits(tmp_path: Path) -> None:
    save_tiny(tmp_path, "minimax_m3_vl_text")
    model, _ = load_model(resolve_model(str(tmp_path)))
    ids, got = prompt(23), list[torch.Tensor]()
    for backend in (SparseTorch(), SparseTriton()):
        chosen: Any = backend
        sequences, row = Sequences(model, backend=chosen), Row()
        parts = [sequences.step([(row, ids[a:b])])[0] for a, b in ((0, 17), (17, 22), (22, 23))]
        got.append(torch.cat(parts))
    assert_close(got[1], got[0], "Triton")
