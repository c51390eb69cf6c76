"""Kernel times of recurrent layers: the section `recurrent` of `gpu_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_timing import DEVICE, HALF_TFLOP_S, Result, half, memory_us, time_us

from headrace.kernels._triton_delta import Tiling, launch_delta_rule, tiling
from headrace.kernels.gated_norm import gated_norm
from headrace.kernels.ssd import ssd
from headrace.layers.port import StateStep

ROWS = ((1, 8192), (16, 512), (1, 1), (256, 1))
"""Rows, and tokens of each."""
CHUNK = 64
"""Tokens that are worked on together where the operations of a floor are counted."""


def recurrent(tune: bool) -> Iterator[Result]:
    """Qwen3.5's delta rule and what follows it, Kimi Linear's, Nemotron 3's state space.

    Floors: states, or operations in chunks; memory for the norm and gate.
    """
    for rows, count in ROWS:
        step, tokens = step_of(rows, count), rows * count
        for name, heads, groups, dim in (("delta rule", 64, 16, 128), ("delta rule by feature", 32, 32, 128)):
            q, k, v = half(tokens, groups, dim), half(tokens, groups, dim), half(tokens, heads, dim)
            decay = -torch.rand(tokens, heads, dim if "feature" in name else 1, device=DEVICE)
            beta, state = torch.rand(tokens, heads, device=DEVICE), torch.zeros(rows, heads, dim, dim, device=DEVICE)
            best: list[tuple[float, Tiling | None]] = []
            for tuning in delta_tunings("feature" in name) if tune and count > 1 else [None]:

                def run(_: int) -> None:
                    launch_delta_rule(q, k, v, decay=decay, beta=beta, state=state, step=step, tuning=tuning)  # noqa: B023

                best.append((time_us(run, 1, at_least=2, repeats=3), tuning))
            best.sort(key=lambda pair: pair[0])
            note = "; ".join(
                f"{t.values} values, {t.stages} stages, {t.features} features {us:.0f}" for us, t in best if t
            )
            yield Result(name, f"{rows} x {count}", floor_us(rows, count, heads * dim * dim), best[0][0], note)
        scanned, gate, weight = torch.randn(tokens, 64, 128, device=DEVICE), half(tokens, 64, 128), half(128)
        gating = time_us(lambda _: gated_norm(scanned, gate, weight, 1e-6), 1, at_least=2, repeats=3)  # noqa: B023
        yield Result("norm and gate", f"{rows} x {count}", memory_us(tokens * 64 * 128 * 8), gating)
        heads, groups, dim, size = 96, 8, 64, 128
        x, b, c = half(tokens, heads, dim), half(tokens, groups, size), half(tokens, groups, size)
        time, skip = torch.rand(tokens, heads, device=DEVICE), torch.rand(heads, device=DEVICE)
        decay, state = -time, torch.zeros(rows, heads, dim, size, device=DEVICE)
        yield _timed("state space", rows, count, heads * dim * size, lambda: ssd(
            x, b, c, time=time, decay=decay, skip=skip, state=state, step=step  # noqa: B023
        ))  # fmt: skip


def delta_tunings(by_feature: bool) -> list[Tiling | None]:
    """The usual tiles first."""
    usual = tiling(torch.empty(0, dtype=torch.bfloat16), by_feature=by_feature)
    chains = [usual._replace(values=values, stages=stages) for values in (64, 32, 16) for stages in (3, 2)]
    return list(dict.fromkeys([usual, *chains, *(usual._replace(features=features) for features in (16, 32, 64))]))


def _timed(name: str, rows: int, count: int, state_count: int, call: Callable[[], object]) -> Result:
    floor = floor_us(rows, count, state_count)
    return Result(name, f"{rows} x {count}", floor, time_us(lambda _: call(), 1, at_least=2, repeats=3))


def floor_us(rows: int, count: int, state_count: int) -> float:
    """state_count: numbers of one row's state."""
    chunk = min(count, CHUNK)
    flops = rows * count * (6 * state_count + 4 * chunk * state_count / 128)
    return max(memory_us(rows * state_count * 8), flops / HALF_TFLOP_S / 1e6)


def step_of(rows: int, count: int) -> StateStep:
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
