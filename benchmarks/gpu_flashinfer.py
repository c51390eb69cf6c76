"""FlashInfer's attention kernels beside our Triton ones: the section `flashinfer` of `gpu_kernels.py`.

Its schedules are made on the host before the time begins; what one costs there is in the notes, and so is how far the
results are from the Triton kernels'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from gpu_timing import DEVICE, HALF_TFLOP_S, Result, half, memory_us, time_us
from torch import Tensor

from headrace.attention._flashinfer_plan import Kernel, package, pages_of
from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.kernels._triton_decode import launch_decode, plan_decode
from headrace.kernels._triton_prefill import launch_prefill
from headrace.kernels.quantise import FP8, PLAIN, Quantised

DECODE_CASES = [(1, 1024), (64, 1024), (256, 1024), (2048, 192)]
PREFILL_CASES = [([128] * 16, [128] * 16), ([8192], [8192]), ([32768], [8192])]
WORKSPACE_BYTES = 128 << 20
"""What the package asks for where it may split contexts."""


@dataclass
class Inputs:
    """One case: a step, and several sets of caches that are larger than the L2 cache together."""

    rows: list[tuple[int, int]]  # (tokens, length in the cache)
    step: AttentionStep
    caches: list[LayerCache]
    spec: AttentionSpec
    workspace: Tensor

    def __post_init__(self) -> None:
        self.dtype = self.caches[0].k.dtype
        self.q = half(sum(count for count, _ in self.rows), self.spec.num_heads, self.spec.head_dim)
        self.out = torch.empty_like(self.q)

    @property
    def scales(self) -> dict[str, float | None]:
        is_fp8 = self.dtype == FP8
        return {"k_scale": self.spec.k_scale if is_fp8 else None, "v_scale": self.spec.v_scale if is_fp8 else None}

    def planned(self, wrapper: Any, *, is_decode: bool) -> tuple[Callable[[int], None], float]:
        """-> (a call with the i-th set, microseconds of the schedule on the host)"""
        spec = self.spec
        kernel = Kernel.of(spec, block_size=self.step.block_size, dtype=self.q.dtype, kv_dtype=self.dtype)
        tables = self.step.block_tables
        shapes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, self.step.block_size)
        common = {"sm_scale": spec.scale, "q_data_type": self.q.dtype, "kv_data_type": self.dtype}
        begin = 0.0
        for _ in range(2):  # the first one loads kernels
            begin = time.perf_counter()
            pages = pages_of(self.rows, kernel, table_width=tables.shape[1])
            indices = tables.flatten()[pages.places.to(DEVICE)]
            starts = (pages.starts,) if is_decode else (pages.query_starts, pages.starts)
            causal = {} if is_decode else {"causal": True}
            wrapper.plan(*starts, indices, pages.last_lens, *shapes, **common, **causal)
        took_us = (time.perf_counter() - begin) * 1e6

        def call(i: int) -> None:
            cache = self.caches[i]
            wrapper.run(self.q, (cache.k, cache.v), out=self.out, enable_pdl=False, **self.scales)

        return call, took_us


Make = Callable[[Inputs], tuple[Callable[[int], None], float]]


def vector(inputs: Inputs) -> tuple[Callable[[int], None], float]:
    """Without tensor cores: the package's kernel for one query a row."""
    return inputs.planned(package().BatchDecodeWithPagedKVCacheWrapper(inputs.workspace, "HND"), is_decode=True)


def tensor(backend: str) -> Make:
    def make(inputs: Inputs) -> tuple[Callable[[int], None], float]:
        wrapper = package().BatchPrefillWithPagedKVCacheWrapper(inputs.workspace, "HND", backend=backend)
        return inputs.planned(wrapper, is_decode=False)

    return make


def triton_decode(inputs: Inputs) -> tuple[Callable[[int], None], float]:
    spec, num = inputs.spec, len(inputs.rows)
    plan = plan_decode(num, spec.num_heads, spec.num_kv_heads, spec.head_dim, max_kv=inputs.step.max_kv, device=DEVICE)
    out = Quantised(inputs.out.flatten(1))

    def call(i: int) -> None:
        cache = inputs.caches[i]
        launch_decode(inputs.q, cache.k, cache.v, inputs.step, spec, out=out, form=PLAIN, plan=plan, first_row=0)

    return call, 0.0


def triton_prefill(inputs: Inputs) -> tuple[Callable[[int], None], float]:
    out = Quantised(inputs.out.flatten(1))

    def call(i: int) -> None:
        cache = inputs.caches[i]
        launch_prefill(
            inputs.q, cache.k, cache.v, inputs.step, inputs.spec,
            out=out, form=PLAIN, num_rows=len(inputs.rows), max_query=inputs.step.max_query,
        )  # fmt: skip

    return call, 0.0


DECODE: dict[str, Make] = {
    "Triton": triton_decode,
    "FlashInfer without tensor cores": vector,
    "FlashInfer fa2": tensor("fa2"),
}
PREFILL: dict[str, Make] = {"Triton": triton_prefill, "FlashInfer fa2": tensor("fa2"), "FlashInfer fa3": tensor("fa3")}


def flashinfer(
    tune: bool,
    *,
    spec: AttentionSpec,
    step_of: Callable[[Sequence[int], Sequence[int]], tuple[AttentionStep, int]],
    caches: Callable[[int, torch.dtype, int], list[LayerCache]],
) -> Iterator[Result]:
    """Args: step_of, caches: those of `gpu_kernels.py`."""
    if find_spec("flashinfer") is None:
        print("| FlashInfer is not installed | | | | | |")
        return
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    cases = [([length] * num, [1] * num) for num, length in DECODE_CASES] + PREFILL_CASES
    for lengths, queries in cases:
        for dtype in (torch.bfloat16, FP8):
            step, blocks = step_of(lengths, queries)
            is_decode = max(queries) == 1
            num_bytes = sum(lengths) * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
            num_sets = max(1, min(32, int(2e8 / num_bytes))) if is_decode else 1
            inputs = Inputs(list(zip(queries, lengths)), step, caches(blocks, dtype, num_sets), spec, workspace)
            pairs = sum(count * (length - count) + count * (count + 1) / 2 for count, length in inputs.rows)
            flops = 4 * spec.num_heads * spec.head_dim * pairs
            floor = memory_us(num_bytes) if is_decode else flops / HALF_TFLOP_S / 1e6
            what = "decode" if is_decode else "prefill"
            shape = f"{len(lengths)} x {lengths[0]}" if is_decode else f"{len(lengths)} x {queries[0]} of {lengths[0]}"
            yield from _compared(
                f"{what} attention ({dtype})", shape, inputs, DECODE if is_decode else PREFILL, floor=floor, flops=flops
            )


def _compared(
    name: str, shape: str, inputs: Inputs, makers: dict[str, Make], *, floor: float, flops: float
) -> Iterator[Result]:
    """The first one's result is what the others are held to."""
    expected: Tensor | None = None
    for label, make in makers.items():
        if label.endswith("fa3") and inputs.dtype == FP8:
            continue  # it would take queries in FP8 only
        inputs.out.zero_()
        try:
            call, plan_us = make(inputs)
            call(0)
            torch.cuda.synchronize()
            found = inputs.out.clone()
            us = time_us(call, len(inputs.caches), at_least=4 if makers is DECODE else 2, repeats=5)
        except Exception as error:  # one kernel that is missing leaves the others' numbers
            print(f"| {name}: {label} | {shape} | | | | {type(error).__name__}: {str(error).splitlines()[-1:]} |")
            continue
        notes = [] if makers is DECODE else [f"{flops / us / 1e6:.0f} TFLOP/s"]
        if expected is None:
            expected = found
        else:
            notes += [f"differs by {(found - expected).abs().max().item():.1e}", f"schedule {plan_us:.0f} us"]
        yield Result(f"{name}: {label}", shape, floor, us, "; ".join(notes))
