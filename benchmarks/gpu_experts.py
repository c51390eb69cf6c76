"""Kernel times of mixtures of experts: the section `experts` of `gpu_kernels.py`."""

# ruff: noqa: B023 (closures over a loop's variables are timed before the loop goes on)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from gpu_timing import DEVICE, FP8_TFLOP_S, HALF_TFLOP_S, Result, eight, half, memory_us, time_us
from torch import Tensor

from headrace.kernels.moe._triton_grouped import GroupedTuning
from headrace.kernels.moe._triton_packed import Packed, PackedTuning
from headrace.kernels.moe._triton_route import launch_route, launch_sort
from headrace.kernels.moe.port import ExpertAct, ExpertWeights, Routing, Stacked
from headrace.kernels.moe.triton import TritonMoe, tile_rows
from headrace.kernels.quantise import Form

EXPERT_SHAPES = {
    # experts, chosen, hidden, inner, how weights are stored
    "Qwen3-30B-A3B": (128, 8, 2048, 768, "plain"),
    "Qwen3-30B-A3B, FP8 blocks": (128, 8, 2048, 768, "fp8_block"),
    "Qwen3-30B-A3B, FP8 by output": (128, 8, 2048, 768, "fp8"),
    "gpt-oss-20b": (32, 4, 2880, 2880, "mxfp4"),
}
EXPERT_TILES = [GroupedTuning(outputs, inputs, warps, stages, is_weights_first)
                for is_weights_first in (False, True) for outputs in (32, 64, 128, 256) for inputs in (64, 128)
                for warps in (4, 8) for stages in (3, 4, 5) if outputs >= 64 or not is_weights_first]  # fmt: skip
PACKED_TILES = [PackedTuning(outputs, warps, stages, is_weights_first)
                for is_weights_first in (False, True) for outputs in (32, 64, 128, 256)
                for warps in (4, 8) for stages in (3, 4, 5) if outputs >= 64 or not is_weights_first]  # fmt: skip


def stacked(num: int, out: int, features: int, kind: str) -> Stacked:
    """One product's weights of all experts, random."""
    if kind == "plain":
        return Stacked("plain", half(num, out, features))
    if kind == "mxfp4":
        codes = torch.randint(256, (num, out, features // 2), device=DEVICE, dtype=torch.uint8)
        return Stacked("mxfp4", codes, torch.full((num, out, features // 32), 120, device=DEVICE, dtype=torch.uint8))
    if kind == "fp8":
        scales = torch.full((num, out, 1), 0.01, device=DEVICE)
        return Stacked("fp8", eight(num, out, features), scales, form=Form("token"))
    scales = torch.full((num, -(-out // 128), features // 128), 0.01, device=DEVICE)
    return Stacked("fp8", eight(num, out, features), scales, form=Form("group"))


def experts(tune: bool) -> Iterator[Result]:
    """Routing, sorting, both grouped products, the whole. Floors: weights of the experts used, or operations."""
    for name, (num, chosen, hidden, inner, kind) in EXPERT_SHAPES.items():
        act = ExpertAct(limit=7.0, alpha=1.702, up_offset=1.0, is_interleaved=True) if kind == "mxfp4" else ExpertAct()
        gate_up, down = stacked(num, 2 * inner, hidden, kind), stacked(num, hidden, inner, kind)
        weights = ExpertWeights(gate_up, down, act, torch.bfloat16)
        prepared = TritonMoe().prepare(weights)
        for tokens in (1, 16, 64, 256, 2048, 8192):
            pairs = tokens * chosen
            routing = Routing(num, chosen, normalise=True)
            logits, x = [half(tokens, num) for _ in range(4)], [half(tokens, hidden) for _ in range(4)]
            us = time_us(lambda i: launch_route(logits[i], None, routing), 4)
            yield Result("route", f"{name}: {tokens} tokens", memory_us(tokens * (num * 2 + chosen * 8)), us)
            routed = [launch_route(part, None, routing) for part in logits]
            rows = tile_rows(pairs, num)
            place = {"num_experts": num, "first_expert": 0, "rows": rows}
            us = time_us(lambda i: launch_sort(routed[i].ids, **place), 4)
            yield Result("sort", f"{name}: {pairs} pairs", memory_us(pairs * 8), us)
            used = float(torch.tensor([len(part.ids.unique()) for part in routed]).float().mean())
            rate = (FP8_TFLOP_S if kind.startswith("fp8") else HALF_TFLOP_S) * 1e6
            tiles = [launch_sort(part.ids, **place) for part in routed]
            inners = [half(pairs, inner) for _ in range(4)]
            for side, ready, source, after in (
                (gate_up, prepared.gate_up, x, act), (down, prepared.down, inners, None)
            ):  # fmt: skip
                floor = max(
                    memory_us(side.size_bytes * used / num), 2 * pairs * side.out_features * side.in_features / rate
                )

                def call(i: int, tuning: GroupedTuning | PackedTuning | None = None) -> Tensor:
                    return TritonMoe().product(
                        source[i], ready, tiles[i], pairs, act_after=after, out_dtype=torch.bfloat16, tuning=tuning
                    )

                note = f"{rows} rows a tile, {used:.0f} experts"
                if tune:
                    note += f"; best {best_tuning(call, PACKED_TILES if isinstance(ready, Packed) else EXPERT_TILES)}"
                part = "gate_up" if after else "down"
                yield Result(f"grouped product ({part})", f"{name}: {tokens} tokens", floor, time_us(call, 4), note)
            floor = max(
                memory_us((gate_up.size_bytes + down.size_bytes) * used / num),
                2 * pairs * 3 * hidden * inner / rate,
            )
            us = time_us(lambda i: TritonMoe().run(x[i], routed[i], prepared), 4)
            yield Result("experts, routed", f"{name}: {tokens} tokens", floor, us)


def best_tuning(
    call: Callable[[int, GroupedTuning | PackedTuning], object], choices: Sequence[GroupedTuning | PackedTuning]
) -> str:
    """The fastest of those that the device has room for."""
    found: list[tuple[float, GroupedTuning | PackedTuning]] = []
    for choice in choices:
        try:
            found.append((time_us(lambda i: call(i, choice), 4, repeats=3), choice))
        except Exception:  # too much shared memory, or no such layout: not one that could be chosen
            torch.cuda.synchronize()
    us, choice = min(found)
    return f"{tuple(choice)} {us:.1f}"
