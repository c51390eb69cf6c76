"""What the kernel benchmarks share: timing by graph replays, an H200's rates, random inputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.quantise import FP8

DEVICE = torch.device("cuda")
READ_TB_S = 4.2
"""What reading alone reaches on an H200."""
FP8_TFLOP_S = 1300.0
HALF_TFLOP_S = 600.0


@dataclass
class Result:
    kernel: str
    shape: str
    floor_us: float
    measured_us: float
    note: str = ""

    def __str__(self) -> str:
        times = f"{self.floor_us:.1f} | {self.measured_us:.1f} | {self.floor_us / self.measured_us:.0%}"
        return f"| {self.kernel} | {self.shape} | {times} | {self.note} |"


def time_us(call: Callable[[int], object], num_sets: int, *, repeats: int = 7, at_least: int = 8) -> float:
    """Microseconds of one call; `call(i)` uses the i-th set of inputs."""
    count = max(num_sets, at_least)
    for i in range(min(num_sets, 2)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % num_sets)
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    return statistics.median(times[2:])


def memory_us(num_bytes: float) -> float:
    return num_bytes / READ_TB_S / 1e6


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def eight(*shape: int) -> Tensor:
    out = torch.empty(shape, device=DEVICE, dtype=FP8)
    for part in out.view(-1, shape[-1]).split(1 << 16):
        part.copy_(torch.randn(part.shape, device=DEVICE))
    return out
