"""Kernel times on one GPU, beside the floor that bytes and operations set: Llama 3.1 8B, two mixtures of experts.

    python benchmarks/gpu_kernels.py [--only decode,linear] [--tune]

Times are medians of CUDA graph replays; each graph runs over several sets of inputs, together larger than the L2 cache.
Results are checked against the torch twins by the tests marked `gpu`, not here.
"""

# ruff: noqa: B023 (closures over a loop's variables are timed before the loop goes on)

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from gpu_experts import experts
from gpu_fla import fla
from gpu_flashinfer import flashinfer
from gpu_latent import latent
from gpu_recurrent import recurrent
from gpu_timing import DEVICE, FP8_TFLOP_S, HALF_TFLOP_S, Result, eight, half, memory_us, time_us

from headrace.attention.port import AttentionSpec, AttentionStep, LayerCache
from headrace.attention.triton import TritonAttention
from headrace.kernels import _triton_decode, _triton_linear, _triton_prefill
from headrace.kernels._triton_draw import DrawTuning, launch_draw
from headrace.kernels._triton_linear import StreamTuning
from headrace.kernels._triton_rope import launch_rope_write
from headrace.kernels._triton_rows import launch_act_mul, launch_norm, launch_quantise
from headrace.kernels._triton_sample import launch_shape
from headrace.kernels.fp8_linear import fp8_linear
from headrace.kernels.gated_linear import gated_linear
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised
from headrace.kernels.rope_write import Projected
from headrace.kernels.slot_table import SlotTable

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128_256
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "out": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
BLOCK = 32
SPEC = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, k_scale=0.05, v_scale=0.05)


SCALE = Form("static", torch.tensor([0.02], device=DEVICE)) if torch.cuda.is_available() else PLAIN


def rows(tune: bool) -> Iterator[Result]:
    """Norm, activation and quantise."""
    weight = half(HIDDEN)
    for num in (1, 256, 2048, 4096):
        sets = max(1, min(16, 4096 // num))
        x, residual, gates = ([half(num, width) for _ in range(sets)] for width in (HIDDEN, HIDDEN, 2 * INNER))
        for form in (SCALE, Form("token")):
            floor = memory_us(num * HIDDEN * 7)
            us = time_us(lambda i: launch_norm(x[i], weight, 1e-5, form=form, residual=residual[i]), sets)
            yield Result(f"norm + residual + quantise ({form.kind})", f"{num} x {HIDDEN}", floor, us)
            us = time_us(lambda i: launch_act_mul(gates[i], "silu", form=form), sets)
            yield Result(f"silu * up + quantise ({form.kind})", f"{num} x {INNER}", memory_us(num * INNER * 5), us)
        us = time_us(lambda i: launch_quantise(x[i], SCALE), sets)
        yield Result("quantise (static)", f"{num} x {HIDDEN}", memory_us(num * HIDDEN * 3), us)


def caches(num_blocks: int, dtype: torch.dtype, count: int) -> list[LayerCache]:
    shape = (num_blocks, KV_HEADS, BLOCK, DIM)
    make = eight if dtype == FP8 else half
    return [LayerCache(make(*shape), make(*shape)) for _ in range(count)]


def step_of(lengths: Sequence[int], queries: Sequence[int], *, first_block: int = 1) -> tuple[AttentionStep, int]:
    """Rows whose last `queries` tokens are computed, over blocks in random order. -> (step, blocks needed)"""
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts)) + first_block
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : len(blocks)] = blocks
    query = torch.tensor(queries)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query.cumsum(0)])
    row_of = torch.arange(len(lengths)).repeat_interleave(query)
    positions = torch.tensor(lengths)[row_of] - query[row_of] + torch.arange(int(starts[-1])) - starts[row_of]
    slots = tables[row_of, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return AttentionStep(
        block_size=BLOCK,
        query_starts=starts.int().to(DEVICE),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        positions=positions.to(DEVICE),
        block_tables=tables.to(DEVICE),
        write_slots=slots.to(DEVICE),
        max_query=max(queries),
        max_kv=max(lengths),
        num_context_rows=sum(count > 1 for count in queries),
    ), sum(counts) + first_block


def rope(tune: bool) -> Iterator[Result]:
    width = (HEADS + 2 * KV_HEADS) * DIM
    for num in (1, 256, 2048, 4096):
        step, blocks = step_of([1] * num, [1] * num)
        cache = caches(blocks, FP8, 1)[0]
        sets = max(1, min(16, 4096 // num))
        qkv = [half(num, width) for _ in range(sets)]
        cos = torch.rand(num, DIM // 2, device=DEVICE)

        def run(i: int) -> None:
            packed = Projected(qkv[i], HEADS, KV_HEADS, cos, cos)
            launch_rope_write(packed, cache.k, cache.v, step.write_slots, k_scale=0.05, v_scale=0.05)

        floor = memory_us(num * (2 * width + 2 * HEADS * DIM + 2 * KV_HEADS * DIM + 4 * DIM))
        yield Result("rope + KV write (FP8)", f"{num} tokens", floor, time_us(run, sets))


DECODE_CASES = [(1, 1024), (1, 200), (1, 32768), (16, 1024), (64, 1024), (256, 1024), (1300, 1500), (2048, 192)]
DECODE_TUNINGS = [
    (64, 4, 2), (64, 4, 1), (32, 2, 2), (32, 2, 1), (32, 1, 2), (32, 1, 1), (64, 2, 1), (64, 8, 3), (128, 4, 1),
]  # fmt: skip


def decode(tune: bool) -> Iterator[Result]:
    for dtype in (FP8, torch.bfloat16):
        for num, length in DECODE_CASES:
            if dtype != FP8 and num not in (1, 2048):
                continue
            step, blocks = step_of([length] * num, [1] * num)
            num_bytes = num * length * 2 * KV_HEADS * DIM * dtype.itemsize
            layers = caches(blocks, dtype, max(1, min(32, int(2e8 / num_bytes))))
            q = half(num, HEADS, DIM)
            out = Quantised(torch.empty(num, HEADS * DIM, dtype=torch.bfloat16, device=DEVICE))
            plan = _triton_decode.plan_decode(num, HEADS, KV_HEADS, DIM, max_kv=length, device=DEVICE)
            best: list[tuple[float, object]] = []
            for tuning in DECODE_TUNINGS if tune else [None]:

                def run(i: int) -> None:
                    _triton_decode.launch_decode(
                        q, layers[i].k, layers[i].v, step, SPEC,
                        out=out, form=PLAIN, plan=plan, first_row=0, tuning=tuning,
                    )  # fmt: skip

                best.append((time_us(run, len(layers), at_least=4), tuning))
            best.sort(key=lambda pair: pair[0])
            note = f"{plan.num_splits} parts; " + "; ".join(f"{t} {us:.1f}" for us, t in best[:6] if t)
            yield Result(f"decode attention ({dtype})", f"{num} x {length}", memory_us(num_bytes), best[0][0], note)
            layers.clear()


PREFILL_CASES = [([128] * 16, [128] * 16), ([8192], [8192]), ([32768], [8192]), ([2048] * 4, [2048] * 4)]
PREFILL_TUNINGS = [
    (128, 64, 4, 3),
    (128, 64, 4, 2),
    (128, 64, 4, 4),
    (128, 128, 8, 3),
    (128, 32, 4, 4),
    (128, 128, 4, 2),
]


def prefill(tune: bool) -> Iterator[Result]:
    for dtype in (FP8, torch.bfloat16):
        for lengths, queries in PREFILL_CASES:
            step, blocks = step_of(lengths, queries)
            cache = caches(blocks, dtype, 1)[0]
            q = half(sum(queries), HEADS, DIM)
            out = Quantised(torch.empty(len(q), HEADS * DIM, dtype=torch.bfloat16, device=DEVICE))
            pairs = sum(count * (length - count) + count * (count + 1) / 2 for length, count in zip(lengths, queries))
            flops = 4 * HEADS * DIM * pairs
            best: list[tuple[float, object]] = []
            for tuning in PREFILL_TUNINGS if tune else [None]:

                def run(i: int) -> None:
                    _triton_prefill.launch_prefill(
                        q, cache.k, cache.v, step, SPEC,
                        out=out, form=PLAIN, num_rows=len(lengths), max_query=max(queries), tuning=tuning,
                    )  # fmt: skip

                best.append((time_us(run, 1, at_least=2, repeats=3), tuning))
            best.sort(key=lambda pair: pair[0])
            rate = f"{flops / best[0][0] / 1e6:.0f} TFLOP/s; "
            note = rate + "; ".join(f"{t} {us:.0f}" for us, t in best[:6] if t)
            shape = f"{len(lengths)} x {queries[0]} of {lengths[0]}"
            yield Result(f"prefill attention ({dtype})", shape, flops / HALF_TFLOP_S / 1e6, best[0][0], note)


STREAM_TUNINGS = [
    StreamTuning(inputs, parts, 4, stages)
    for inputs, stages in ((256, 3), (256, 4), (256, 6), (128, 6), (512, 3))
    for parts in (1, 2, 4)
]


def linear(tune: bool) -> Iterator[Result]:
    """The products of generation at few rows."""
    layers = [{name: eight(*shape) for name, shape in SHAPES.items()} for _ in range(4)]
    one = torch.tensor([0.01], device=DEVICE)
    for num in (1, 8, 16, 32, 64):
        total = 0.0
        for name, (num_out, num_in) in SHAPES.items():
            act = Quantised(eight(num, num_in), one)
            best: list[tuple[float, object]] = []
            fitting = [t for t in STREAM_TUNINGS if num_in % (t.inputs * t.parts) == 0]
            for tuning in fitting if tune and num == 1 else [None]:

                def run(i: int) -> None:
                    _triton_linear.launch_stream(
                        act, layers[i][name], one, None, out_dtype=torch.bfloat16, tuning=tuning
                    )

                best.append((time_us(run, 4, at_least=16, repeats=3), tuning))
            best.sort(key=lambda pair: pair[0])
            vendor = time_us(
                lambda i: torch._scaled_mm(
                    act.data,
                    layers[i][name].t(),
                    scale_a=one,
                    scale_b=one,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                ),
                4,
                at_least=16,
            )
            total += best[0][0]
            note = f"vendor {vendor:.1f}; " + "; ".join(f"{tuple(t)} {us:.1f}" for us, t in best[:8] if t)
            floor = memory_us(num_out * num_in)
            yield Result(f"FP8 linear {name}", f"{num} rows", floor, best[0][0], note)
        yield Result("FP8 linears of 32 layers", f"{num} rows", memory_us(6.979e9), 32 * total)


def gated(tune: bool) -> Iterator[Result]:
    """The first half of the MLP as one kernel, beside the product and the activation after one another."""
    weights = [eight(*SHAPES["gate_up"]) for _ in range(4)]
    one = torch.tensor([0.01], device=DEVICE)
    for num in (1, 8, 16):
        act = Quantised(eight(num, HIDDEN), one)

        def fused(i: int) -> None:
            _triton_linear.launch_gated(act, weights[i], one, "silu", form=SCALE, dtype=torch.bfloat16)

        def apart(i: int) -> None:
            launch_act_mul(fp8_linear(act, weights[i], one, out_dtype=torch.bfloat16), "silu", form=SCALE)

        note = f"apart {time_us(apart, 4, at_least=16):.1f}"
        floor = memory_us(2 * INNER * HIDDEN)
        yield Result("FP8 gate-up + silu + quantise", f"{num} rows", floor, time_us(fused, 4, at_least=16), note)


DRAW_TUNINGS = [
    DrawTuning(),
    *(DrawTuning(part, warps=warps) for part, warps in ((2048, 4), (2048, 8), (4096, 16))),
    DrawTuning(registers=64),
    DrawTuning(candidates=1024),
    DrawTuning(pick_warps=4),
]


def sample(tune: bool) -> Iterator[Result]:
    """Draws and rules at Llama 3.1's vocabulary; logits that are normal, and peaky ones, as a model's mostly are."""
    rules = {"temperature": (0, torch.inf), "top_k 50": (50, torch.inf), "top_p 0.9": (0, 0.9), "both": (50, 0.9)}
    for num, shape in ((num, shape) for num in (1, 64, 256, 1024) for shape in ("normal", "peaky")):
        logits = [half(num, VOCAB) * (3 if shape == "normal" else 24) for _ in range(2 if num > 64 else 8)]
        slots = torch.arange(num, device=DEVICE)
        for name, (top_k, top_p) in rules.items():
            floats = torch.tensor([[0.8, top_p, -torch.inf, 1.0, 0.0, 0.0]] * num, dtype=torch.float64, device=DEVICE)
            whole = torch.tensor([[7, top_k, 0, 1 << 20, 0, -1, -1]] * num, device=DEVICE)
            none = torch.zeros((0, 1), dtype=torch.int64, device=DEVICE)
            table = SlotTable(floats, whole, none.int(), none, none.float())
            floor = memory_us(2 * num * VOCAB)
            best: list[tuple[float, DrawTuning]] = []
            for tuning in DRAW_TUNINGS if tune else DRAW_TUNINGS[:1]:

                def run(i: int) -> None:
                    launch_draw(logits[i], slots, slots, table, purpose=0, tuning=tuning)

                best.append((time_us(run, len(logits), repeats=3 if tune else 7), tuning))
            note = "; ".join(f"{tuple(each)} {us:.1f}" for us, each in sorted(best, key=lambda pair: pair[0])[:8])
            yield Result(f"draw ({name}, {shape})", f"{num} rows", floor, best[0][0], note if tune else "")
        if shape == "normal":
            us = time_us(lambda i: launch_shape(logits[i], slots, slots, table, num_valid=VOCAB), len(logits))
            yield Result("rules", f"{num} rows", memory_us(6 * num * VOCAB), us)


def layer(tune: bool) -> Iterator[Result]:
    """The four products of a layer, and all the kernels of a layer, one after another."""
    layers = [{name: eight(*shape) for name, shape in SHAPES.items()} for _ in range(4)]
    one, weight = torch.tensor([0.01], device=DEVICE), half(HIDDEN)
    backend = TritonAttention()
    for num, length in ((1, 192), (16, 256), (64, 256), (256, 256), (2048, 192)):
        step, blocks = step_of([length] * num, [1] * num)
        kv = caches(blocks, FP8, 4 if num < 2048 else 1)
        cos = torch.rand(num, DIM // 2, device=DEVICE)
        residual = half(num, HIDDEN)
        x = Quantised(eight(num, HIDDEN), one)

        def products(i: int) -> None:
            for name, (_, num_in) in SHAPES.items():
                act = x if num_in == HIDDEN else Quantised(wide, one)
                fp8_linear(act, layers[i][name], one, out_dtype=torch.bfloat16)

        def whole(i: int) -> None:
            weights = layers[i]
            act, _ = launch_norm(residual, weight, 1e-5, form=SCALE, residual=residual)
            packed = Projected(
                fp8_linear(act, weights["qkv"], one, out_dtype=torch.bfloat16), HEADS, KV_HEADS, cos, cos
            )
            mixed = backend.run(packed, cache=kv[i % len(kv)], step=step, spec=SPEC, form=SCALE)
            partial = fp8_linear(mixed, weights["out"], one, out_dtype=torch.bfloat16)
            act, _ = launch_norm(partial, weight, 1e-5, form=SCALE, residual=residual)
            act = gated_linear(act, weights["gate_up"], one, "silu", form=SCALE, dtype=torch.bfloat16)
            fp8_linear(act, weights["down"], one, out_dtype=torch.bfloat16)

        wide = eight(num, INNER)
        flops = 2 * num * sum(a * b for a, b in SHAPES.values())
        floor = max(memory_us(6.979e9 / 32), flops / FP8_TFLOP_S / 1e6)
        attention = memory_us(num * length * 2 * KV_HEADS * DIM)
        yield Result("four FP8 products", f"{num} rows", floor, time_us(products, 4))
        yield Result("a decode layer", f"{num} x {length}", floor + attention, time_us(whole, 4), _by_kernel(whole))


def _by_kernel(call: Callable[[int], object], *, repeats: int = 8) -> str:
    """Mean microseconds of each kernel of a call, launched one after another."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(repeats):
            call(i % 4)
        torch.cuda.synchronize()
    return "; ".join(
        f"{event.key[:24]} {event.count // repeats} x {event.device_time_total / event.count:.1f}"
        for event in profile.key_averages()
        if event.device_time_total
    )


def head(tune: bool) -> Iterator[Result]:
    weight = [half(VOCAB, HIDDEN) for _ in range(2)]
    for num in (1, 256, 2048):
        x = half(num, HIDDEN)
        floor = max(memory_us(VOCAB * HIDDEN * 2), 2 * num * VOCAB * HIDDEN / 790e6)
        yield Result("head (bf16)", f"{num} rows", floor, time_us(lambda i: F.linear(x, weight[i]), 2))


SECTIONS = {
    "experts": experts,
    "rows": rows,
    "rope": rope,
    "decode": decode,
    "prefill": prefill,
    "linear": linear,
    "gated": gated,
    "sample": sample,
    "layer": layer,
    "head": head,
    "recurrent": recurrent,
    "latent": partial(latent, step_of=step_of),
    "fla": fla,
    "flashinfer": partial(flashinfer, spec=SPEC, step_of=step_of, caches=caches),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--tune", action="store_true", help="try the listed tile sizes and show the best")
    options = parser.parse_args()
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print("| kernel | shape | floor us | measured us | of the floor's rate | |\n|---|---|---|---|---|---|")
    for name in options.only.split(","):
        for result in SECTIONS[name](options.tune):
            print(result, flush=True)


if __name__ == "__main__":
    main()
