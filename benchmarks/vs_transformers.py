"""Headrace beside transformers on this CPU: the same model, prompts and threads, in one run.

    python benchmarks/vs_transformers.py [--http] [--dtype bfloat16] [--threads 2] [--repeats 5]

ShareGPT prompts of 16 to 512 tokens with 64 new tokens each, all at once and one of them alone; greedy, EOS ignored,
prefill included. transformers runs `generate` on a left-padded batch, in bfloat16 and in float32. Each engine has a
process of its own, only one works at a time, and repeats are interleaved; a ratio is the median over the repeats of
neighbours' ratios. Prints a Markdown table for docs/performance.md. Refuses to measure on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_process import environment, free_port, running_server
from stream_client import completion_body, stream_together, tokens_per_s

MAX_LOAD = 1.0
WORKER = Path(__file__).with_name("engine_worker.py")
COLD_PROMPT = "The capital of France is"
SERVED = "bench"


@dataclass
class Contender:
    """One row of the table."""

    name: str
    dtype: str
    batch: list[float] = field(default_factory=list)
    """Output tokens a second, by repeat."""
    single: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    first_token_s: float | None = None


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, order: dict[str, Any]) -> None:
        threads = str(order["threads"])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads),
            text=True,
        )
        self._ask(order)

    def run(self, numbers: Sequence[int], num_output: int) -> tuple[float, list[list[int]]]:
        """Output tokens a second, and the outputs."""
        answer = self._ask({"run": list(numbers), "num_output": num_output})
        return len(numbers) * num_output / answer["seconds"], answer["outputs"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, value: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"an engine has ended:\n{self._errors.read()}")
        return json.loads(line)


def load_prompts(options: argparse.Namespace) -> list[list[int]]:
    from headrace.bench.sharegpt import fetch_sharegpt, sharegpt_tasks
    from headrace.hub.source import resolve_model
    from headrace.text.load import load_tokenizer

    tasks = sharegpt_tasks(
        fetch_sharegpt(),
        load_tokenizer(resolve_model(options.model)),
        num_requests=options.prompts,
        output_len=options.output_len,
        min_input_len=16,
        max_input_len=512,
        seed=options.seed,
    )
    return [list(task.prompt) for task in tasks]


def measure(options: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[Contender], list[float]]:
    """The engines' rows, Headrace first, and the rate over HTTP by repeat."""
    rows = [
        Contender("Headrace", options.dtype),
        *(Contender("transformers, padded batch", dtype) for dtype in options.against),
    ]
    over_http: list[float] = []
    everything = range(len(prompts))
    alone = sorted(everything, key=lambda number: len(prompts[number]))[len(prompts) // 2]
    with ExitStack() as stack:
        workers: list[Worker] = []
        for number, row in enumerate(rows):
            order = {"model": options.model, "prompts": prompts, "dtype": row.dtype, "threads": options.threads}
            workers.append(Worker("transformers" if number else "headrace", order))
            stack.callback(workers[-1].close)
            workers[-1].run([alone], 2)
        port = free_port() if options.http else 0
        if port:
            stack.enter_context(running_server(serve_command(options, port), port))
        for repeat in range(options.repeats):
            say(f"repeat {repeat + 1} of {options.repeats}")
            for row, worker in zip(rows, workers):
                rate, row.outputs = worker.run(everything, options.output_len)
                row.batch.append(rate)
                if row is rows[0] and port:
                    over_http.append(rate_over_http(options, port, prompts, repeat))
            for row, worker in zip(rows, workers):
                row.single.append(worker.run([alone], options.output_len)[0])
    return rows, over_http


def serve_command(options: argparse.Namespace, port: int) -> list[str]:
    """The server as users start it, on the same cores."""
    return [
        *(sys.executable, "-m", "headrace.cli.main", "serve", options.model, "--host", "127.0.0.1"),
        *("--port", str(port), "--served_model_name", SERVED, "--dtype", options.dtype),
        *("--engine_threads", str(options.threads), "--log_level", "warning"),
    ]


def rate_over_http(options: argparse.Namespace, port: int, prompts: list[list[int]], repeat: int) -> float:
    bodies = [
        completion_body(SERVED, prompt, num_output=options.output_len, cache_salt=f"repeat {repeat}")
        for prompt in prompts
    ]
    streams = asyncio.run(stream_together(port, bodies))
    assert all(stream.num_tokens == options.output_len for stream in streams), "an answer ended early"
    return tokens_per_s(streams)


def cold_headrace(options: argparse.Namespace) -> float:
    """Seconds from the start of `headrace generate` to the first character of its answer."""
    command = [sys.executable, "-m", "headrace.cli.main", "generate", options.model, COLD_PROMPT]
    command += ["--max_tokens", "8", "--dtype", options.dtype, "--engine_threads", str(options.threads)]
    begin_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    first = process.stdout.read(1)
    took_s = time.monotonic() - begin_s
    _, errors = process.communicate()
    if not first:
        raise RuntimeError(f"headrace generate printed nothing:\n{errors.decode(errors='replace')}")
    return took_s


def cold_transformers(options: argparse.Namespace, dtype: str, prompt: list[int]) -> float:
    """Seconds from the start of a process to its first token."""
    begin_s = time.monotonic()
    worker = Worker(
        "transformers", {"model": options.model, "prompts": [prompt], "dtype": dtype, "threads": options.threads}
    )
    worker.run([0], 1)
    took_s = time.monotonic() - begin_s
    worker.close()
    return took_s


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs))


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    same = sum(a == b for a, b in zip(ours, theirs))
    heads = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in zip(ours, theirs)]
    return f"{same} of {len(ours)} answers are the same ids, and on average the first {statistics.mean(heads):.0f} are"


def as_markdown(
    options: argparse.Namespace, rows: list[Contender], over_http: list[float], load: float, lengths: list[int]
) -> str:
    import torch
    import transformers

    from headrace import __version__
    from headrace.bench.machine import cpu_name

    headrace = rows[0]
    versions = f"headrace {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        f"{datetime.date.today().isoformat()}, {cpu_name()}, {options.threads} threads, load average {load:.2f} at the"
        f" start; {versions}, Python {sys.version.split()[0]}.",
        f"`{' '.join(['python benchmarks/vs_transformers.py', *sys.argv[1:]])}`",
        "",
        f"{options.model}, {len(lengths)} ShareGPT prompts of {min(lengths)} to {max(lengths)} tokens"
        f" (mean {statistics.mean(lengths):.0f}), {options.output_len} new tokens each, greedy, prefill included;"
        f" output tokens/s, median of {options.repeats}.",
        "",
        f"| engine | weights | {len(lengths)} at once | Headrace is | one request | Headrace is | to the first token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        against = ("", "") if row is headrace else (
            f"{ratio(headrace.batch, row.batch):.2f}x", f"{ratio(headrace.single, row.single):.2f}x"
        )  # fmt: skip
        first = "" if row.first_token_s is None else f"{row.first_token_s:.1f} s"
        lines.append(
            f"| {row.name} | {row.dtype} | {statistics.median(row.batch):.1f} | {against[0]} |"
            f" {statistics.median(row.single):.1f} | {against[1]} | {first} |"
        )
    if over_http:
        share = ratio(over_http, headrace.batch)
        lines.append(
            f"| Headrace over HTTP, streamed | {options.dtype} | {statistics.median(over_http):.1f} |"
            f" {share:.0%} of offline | | | |"
        )
    lines += ["", *(f"Against {row.dtype}: {agreement(headrace.outputs, row.outputs)}." for row in rows[1:])]
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="alias, folder or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", help="of Headrace's weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output_len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts drawn")
    parser.add_argument(
        "--against",
        nargs="+",
        default=["bfloat16", "float32"],
        choices=["bfloat16", "float32"],
        help="dtypes of transformers; without 16-bit products in the processor its bfloat16 takes minutes",
    )
    parser.add_argument("--http", action="store_true", help="measure the same prompts over HTTP, too")
    parser.add_argument("--force", action="store_true", help=f"measure even with a load average above {MAX_LOAD}")
    return parser.parse_args()


def main() -> int:
    options = parse()
    load = os.getloadavg()[0]
    if load > MAX_LOAD and not options.force:
        say(f"the load average is {load:.2f}: wait until the machine is quiet, or take what comes with --force")
        return 1
    prompts = load_prompts(options)
    rows, over_http = measure(options, prompts)
    say("cold starts")
    rows[0].first_token_s = cold_headrace(options)
    for row in rows[1:]:
        row.first_token_s = cold_transformers(options, row.dtype, prompts[0])
    print(as_markdown(options, rows, over_http, load, [len(prompt) for prompt in prompts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
