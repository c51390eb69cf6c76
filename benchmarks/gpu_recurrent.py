"""Kernel times of recurrent layers: the section `recurrent` of `gpu_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_timing import DEVICE, HALF_TFLOP_S, Result, half, memory_us, time_us

from headrace.kernels.delta_rule import delta_rule
from headrace.kernels.ssd import ssd
from headrace.layers.port import StateStep

ROWS = ((1, 8192), (16, 512), (1, 1), (256, 1))
"""Rows, and tokens of each."""
CHUNK = 64
"""Tokens that are worked on together where the operations of a floor are counted."""


def recurrent(tune: bool) -> Iterator[Result]:
    """Qwen3.5's delta rule, Kimi Linear's, Nemotron 3's state space. Floors: states, or operations in chunks."""
    for rows, count in ROWS:
        step, tokens = _step(rows, count), rows * count
        for name, heads, groups, dim in (("delta rule", 64, 16, 128), ("delta rule by feature", 32, 32, 128)):
            q, k, v = half(tokens, groups, dim), half(tokens, groups, dim), half(tokens, heads, dim)
            decay = -torch.rand(tokens, heads, dim if "feature" in name else 1, device=DEVICE)
            beta, state = torch.rand(tokens, heads, device=DEVICE), torch.zeros(rows, heads, dim, dim, device=DEVICE)
            yield _timed(name, rows, count, heads * dim * dim, lambda: delta_rule(
                q, k, v, decay=decay, beta=beta, state=state, step=step  # noqa: B023 (timed before the loop goes on)
            ))  # fmt: skip
        heads, groups, dim, size = 96, 8, 64, 128
        x, b, c = torch.randn(tokens, heads, dim, device=DEVICE), half(tokens, groups, size), half(tokens, groups, size)
        decay, state = -torch.rand(tokens, heads, device=DEVICE), torch.zeros(rows, heads, dim, size, device=DEVICE)
        yield _timed("state space", rows, count, heads * dim * size,
                     lambda: ssd(x, b, c, decay=decay, state=state, step=step))  # noqa: B023  # fmt: skip


def _timed(name: str, rows: int, count: int, state_count: int, call: Callable[[], object]) -> Result:
    chunk = min(count, CHUNK)
    flops = rows * count * (6 * state_count + 4 * chunk * state_count / 128)
    floor = max(memory_us(rows * state_count * 8), flops / HALF_TFLOP_S / 1e6)
    return Result(name, f"{rows} x {count}", floor, time_us(lambda _: call(), 1, at_least=2, repeats=3))


def _step(rows: int, count: int) -> StateStep:
    starts = torch.arange(0, rows * count + 1, count, dtype=torch.int32)
    num_context = rows if count > 1 else 0
    return StateStep(
        slots=torch.arange(rows, device=DEVICE),
        query_starts=starts.to(DEVICE),
        positions=torch.arange(rows * count, device=DEVICE),
        max_query=count,
        num_context_rows=num_context,
        context_starts=tuple(starts[: num_context + 1].tolist()),
    )
