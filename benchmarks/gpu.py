"""The figures of one GPU (docs/performance.md), each from nothing: writes its random checkpoint, runs, checks, prints.

    python benchmarks/gpu.py --case P1,P3 [--folder FOLDER] [--check 64] [--report FILE]
    python benchmarks/gpu.py --case P1,P2,P2b,P2c,P3,P5,P6,P7 --shape tiny        (anywhere: proves that it runs)
    python benchmarks/gpu.py --case M1,M2                        (mixtures of experts; weights drawn, none written)
    python benchmarks/gpu.py --case V3,Q35                       (a layer of models that are too large, `gpu_slices.py`)

P: Llama 3.1 8B's shape with FP8 weights, activations and cache. Ids in and out, greedy, no EOS, every prompt its own,
all requests handed over at once, the clock over the whole batch. Of each throughput case as many outputs as `--check`
says are generated again without overlap and without CUDA graphs: other batch sizes round differently, so what is shown
is how many are equal to the end and where the others first differ, and how many are equal where bits are fixed
(`deterministic: true`), with overlap and graphs and without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_checkpoint
import torch
from gpu_slices import SLICES, slices
from prefix_reuse import first_token_times

from headrace import LLM, SamplingParams

GRAPHS = {"max_batch_size": 1024, "enable_padding": True}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one length, all at once."""

    num_requests: int
    input_len: int
    output_len: int
    max_batch_size: int
    policy: str = "guaranteed_no_evict"

    def shrunk(self) -> Load:
        """Of the tiny shape, on a CPU."""
        return Load(min(self.num_requests, 6), min(self.input_len, 24), min(self.output_len, 8), 4, self.policy)


LOADS = {
    "P1": Load(8000, 128, 128, 3072),
    "P2": Load(1024, 128, 2048, 1024, "max_utilization"),
    "P2b": Load(1500, 1000, 1000, 2048, "max_utilization"),
    "P2c": Load(1000, 2048, 128, 1024),
}
TARGETS = {
    "P1": "27,027 tok/s",
    "P2": "22,000 tok/s",
    "P2b": "14,000 tok/s",
    "P2c": "3,300 tok/s",
    "P3": "2.6 ms",
    "P5": "1.26 s",
    "P6": "0.2",
    "P7": "20 s",
    "M1": "8,100 tok/s (512), 3,200 tok/s (64), 3.8 ms (1)",
    "M2": "8,000 tok/s (512)",
    "V3": "us a layer (floor)",
    "Q35": "us a layer (floor)",
}
EXPERTS = {"M1": ("qwen3-30b-a3b", "none"), "M2": ("gpt-oss-20b", "mxfp4")}
"""Shapes and layouts of `random_checkpoint`."""


@dataclass(frozen=True, slots=True)
class Bench:
    folder: Path
    is_tiny: bool
    num_checked: int

    def open(self, **changes: Any) -> LLM:
        kv = {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": False}
        if self.is_tiny:
            kv |= {"max_tokens": 4096}
        settings = {"max_num_tokens": 8192, "cuda_graph_config": GRAPHS, "kv_cache_config": kv} | changes
        return LLM(str(self.folder), skip_tokenizer_init=True, **settings)

    def prompts(self, count: int, length: int, *, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        top = 500 if self.is_tiny else 100_000
        return [[draw.randrange(10, top) for _ in range(length)] for _ in range(count)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, end_id=-1)


def throughput(bench: Bench, load: Load) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "max_batch_size": load.max_batch_size,
        "max_seq_len": load.input_len + load.output_len + 1,
        "scheduler_config": {"capacity_scheduler_policy": load.policy},
    }
    prompts = bench.prompts(load.num_requests, load.input_len)
    with bench.open(**limits) as llm:
        llm.generate(bench.prompts(64, load.input_len, seed=1), greedy(4), use_tqdm=False)
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, greedy(load.output_len), use_tqdm=False)
        seconds = time.perf_counter() - begin_s
    assert isinstance(outputs, list)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(len(each) == load.output_len for each in tokens), "an output is short"
    hits = sum(output.cached_tokens for output in outputs) / (load.num_requests * load.input_len)
    found = {
        "tok/s": round(load.num_requests * load.output_len / seconds),
        "seconds": round(seconds, 2),
        "hit rate": round(hits, 4),
    }
    return found | check(bench, load, prompts, tokens, limits)


def check(
    bench: Bench, load: Load, prompts: Sequence[list[int]], tokens: Sequence[list[int]], limits: dict[str, Any]
) -> dict[str, Any]:
    """Some outputs again, a step at a time and kernel by kernel; then both ways with kernels whose bits are fixed."""
    count = min(bench.num_checked, load.num_requests)
    if not count:
        return {}
    chosen = random.Random(2).sample(range(load.num_requests), count)
    plain: dict[str, Any] = {"cuda_graph_config": None, "disable_overlap_scheduler": True}

    def again(output_len: int, **changes: Any) -> list[list[int]]:
        with bench.open(**limits, **changes) as llm:
            outputs = llm.generate([prompts[at] for at in chosen], greedy(output_len), use_tqdm=False)
        assert isinstance(outputs, list)
        return [list(output.outputs[0].token_ids) for output in outputs]

    lengths = [_same(tokens[at], one) for at, one in zip(chosen, again(load.output_len, **plain), strict=True)]
    equal = sum(length == load.output_len for length in lengths)
    found = {"equal": f"{equal} of {count}", "first difference at (mean)": round(statistics.mean(lengths), 1)}
    short = min(load.output_len, 128)
    fixed = zip(again(short, deterministic=True), again(short, deterministic=True, **plain), strict=True)
    return found | {"equal under deterministic": f"{sum(one == other for one, other in fixed)} of {count}"}


def _same(one: Sequence[int], two: Sequence[int]) -> int:
    """How many first tokens agree."""
    return next((at for at, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def one_request(bench: Bench) -> dict[str, Any]:
    """P3."""
    with bench.open(max_batch_size=64, max_seq_len=1024) as llm:
        return one_at_a_time(bench, llm)


def one_at_a_time(bench: Bench, llm: LLM) -> dict[str, Any]:
    """Milliseconds a token, after the first."""
    count = 8 if bench.is_tiny else 128
    prompts = bench.prompts(8, 128 if count == 128 else 16)

    def seconds(prompt: list[int], num: int) -> float:
        begin_s = time.perf_counter()
        llm.generate(prompt, greedy(num), use_tqdm=False)
        return time.perf_counter() - begin_s

    for prompt in prompts[:2]:
        seconds(prompt, count)
    first = statistics.median(seconds(prompt, 1) for prompt in prompts[2:])
    whole = statistics.median(seconds(prompt, count) for prompt in prompts[2:])
    return {"ms a token": round((whole - first) / (count - 1) * 1000, 3), "first ms": round(first * 1000, 2)}


def experts(name: str) -> dict[str, Any]:
    """M1 and M2: 1,024 tokens in and out, weights drawn on the device."""
    shape, quant = EXPERTS[name]
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint.write_config(Path(folder), random_checkpoint.SHAPES[shape], quant=quant)
        bench = Bench(Path(folder), is_tiny=False, num_checked=0)
        with bench.open(load_format="dummy", max_batch_size=512, max_seq_len=2064) as llm:
            found = one_at_a_time(bench, llm)
            for count in (64, 512):
                prompts = bench.prompts(count, 1024, seed=count)
                llm.generate(prompts, greedy(2), use_tqdm=False)  # or kernels of other shapes are compiled in between
                begin_s = time.perf_counter()
                llm.generate(prompts, greedy(1024), use_tqdm=False)
                found[f"{count} at once, tok/s"] = round(count * 1024 / (time.perf_counter() - begin_s))
    return found


def long_prompt(bench: Bench) -> dict[str, Any]:
    """P5."""
    length = 64 if bench.is_tiny else 32768
    with bench.open(max_batch_size=8, max_num_tokens=16384, max_seq_len=length + 256) as llm:
        times: list[float] = []
        for prompt in bench.prompts(4, length):
            begin_s = time.perf_counter()
            llm.generate(prompt, greedy(1), use_tqdm=False)
            times.append(time.perf_counter() - begin_s)
    return {"first token s": round(statistics.median(times[1:]), 4)}


def shared_prefix(bench: Bench) -> dict[str, Any]:
    """P6."""
    length = 128 if bench.is_tiny else 8192
    top = 500 if bench.is_tiny else 10_000
    with bench.open(max_batch_size=8, max_seq_len=length + 256, kv_cache_config={"max_tokens": 4 * length}) as llm:
        cold, warm, cached = first_token_times(llm, prefix=length, tail=16, repeats=5, max_id=top)
    without, reused = statistics.median(cold), statistics.median(warm)
    ratio = round(reused / without, 3)
    return {"ratio": ratio, "without ms": round(without * 1000, 1), "with ms": round(reused * 1000, 1), "hits": cached}


START = """
import sys, time
begin_s = time.perf_counter()
from headrace import LLM, SamplingParams
with LLM(sys.argv[1], skip_tokenizer_init=True, max_seq_len=1024, fast_start=sys.argv[2] == "fast") as llm:
    llm.generate([1, 2, 3], SamplingParams(max_tokens=1, end_id=-1), use_tqdm=False)
    print("seconds", time.perf_counter() - begin_s)
"""


def start(bench: Bench) -> dict[str, Any]:
    """P7: a process from its first line to its first token; what the first one compiled is on the disk."""

    def seconds(kind: str) -> float:
        command = [sys.executable, "-c", START, str(bench.folder), kind]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return round(float(shown.split("seconds")[1].split()[0]), 1)

    return {"first s": seconds("whole"), "second s": seconds("whole"), "second, fast_start s": seconds("fast")}


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "P3": one_request,
    "P5": long_prompt,
    "P6": shared_prefix,
    "P7": start,
}


def measure(name: str, bench: Bench) -> dict[str, Any]:
    if name in LOADS:
        return throughput(bench, LOADS[name].shrunk() if bench.is_tiny else LOADS[name])
    if name in EXPERTS:
        return experts(name)
    if name in SLICES:
        return slices(name, is_tiny=bench.is_tiny)
    return CASES[name](bench)


def main() -> None:
    names = [*LOADS, *CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", default=",".join(names), help=f"of {', '.join([*names, *EXPERTS, *SLICES])}, with commas"
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=["llama-3.1-8b", "tiny"])
    parser.add_argument("--folder", type=Path, help="where the checkpoint is or shall be; kept")
    parser.add_argument("--check", type=int, default=64, help="outputs to generate again")
    parser.add_argument("--report", type=Path, help="JSON to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / options.shape
        wanted = options.case.split(",")
        if not (folder / "config.json").exists() and not EXPERTS.keys() | SLICES.keys() >= set(wanted):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            shape = random_checkpoint.SHAPES[options.shape]
            random_checkpoint.write(folder, shape, quant="none" if options.shape == "tiny" else "fp8", device=device)
        bench = Bench(folder, options.shape == "tiny", options.check)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        print(f"{device}, torch {torch.__version__}, {options.shape}\n\n| id | must reach | measured |\n|---|---|---|")
        report: dict[str, Any] = {}
        for name in wanted:
            report[name] = measure(name, bench)
            shown = "; ".join(f"{key} {value}" for key, value in report[name].items())
            print(f"| {name} | {TARGETS[name]} | {shown} |", flush=True)
    if options.report:
        options.report.write_text(json.dumps({"device": device, "torch": torch.__version__, "cases": report}, indent=1))


if __name__ == "__main__":
    main()
