"""flash-linear-attention's delta rule beside ours: the section `fla` of `gpu_kernels.py`.

Both as the engine calls them: queued by the host, states read from their slots and written back. The first call of a
shape, which tries several forms of each kernel, comes before the time begins; the notes say how long it took, and how
far the package's results are from our torch twin's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from gpu_recurrent import floor_us, step_of
from gpu_timing import DEVICE, Result, half
from torch import Tensor

from headrace.kernels._fla import fla_delta_rule
from headrace.kernels._triton_delta import launch_delta_rule
from headrace.kernels.delta_rule import delta_rule_twin

ROWS = ((1, 8192), (1, 4096), (1, 2048), (1, 512), (16, 512))
"""Rows, and tokens of each."""
LAYERS = (("delta rule", 64, 16, 128), ("delta rule by feature", 32, 32, 128))
"""Qwen3.5's and Kimi Linear's: heads, key heads, features of both."""
CHECKED_TOKENS = 2048


def fla(tune: bool) -> Iterator[Result]:
    if find_spec("fla") is None:
        print("flash-linear-attention is not installed: pip install 'headrace[fla]'")
        return
    for name, heads, groups, dim in LAYERS:
        for rows, count in ROWS:
            tokens, step = rows * count, step_of(rows, count)
            tensors = {
                "q": half(tokens, groups, dim),
                "k": half(tokens, groups, dim),
                "v": half(tokens, heads, dim),
                "decay": -torch.rand(tokens, heads, dim if "feature" in name else 1, device=DEVICE),
                "beta": torch.rand(tokens, heads, device=DEVICE),
                "state": torch.randn(rows, heads, dim, dim, device=DEVICE),
            }
            floor = floor_us(rows, count, heads * dim * dim)
            for whose, scan in (("ours", launch_delta_rule), ("fla-core", fla_delta_rule)):
                note = ""
                if tokens <= CHECKED_TOKENS:
                    theirs, twins = ({part: tensor.clone() for part, tensor in tensors.items()} for _ in range(2))
                    expected = delta_rule_twin(**twins, step=step)
                    out = scan(**theirs, step=step)
                    off = _off(out, expected), _off(theirs["state"], twins["state"])
                    note = f"from the twin: out {off[0]:.1e}, state {off[1]:.1e}; "
                first, took = _eager_us(lambda: scan(**tensors, step=step))  # noqa: B023 (timed before the loop goes on)
                yield Result(f"{name}, {whose}", f"{rows} x {count}", floor, took, f"{note}first call {first:.1f} s")


def _off(got: Tensor, expected: Tensor) -> float:
    """Relative to the expected values' length."""
    return float((got - expected).norm() / expected.norm())


def _eager_us(call: Callable[[], object], *, times: int = 20) -> tuple[float, float]:
    """-> (seconds of the first call, microseconds of one of many)"""
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return first, start.elapsed_time(end) * 1000 / times
