"""One engine in a process of its own, for vs_transformers.py: Headrace or transformers, ids in and ids out.

    python benchmarks/engine_worker.py headrace|transformers

The first line of standard input is an `Order`; the answer is {"ready": true}. Each further line,
{"run": [numbers of prompts], "num_output": n}, generates for those prompts together and is answered with
{"seconds": s, "outputs": [[ids], ...]}. The end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Run = Callable[[list[list[int]], int], tuple[float, list[list[int]]]]
"""(prompts, new tokens of each) -> seconds, output ids."""


@dataclass(frozen=True)
class Order:
    model: str
    prompts: list[list[int]]
    dtype: str
    threads: int


def open_headrace(order: Order) -> Run:
    from headrace.bench.drive import Driver
    from headrace.bench.workload import Task
    from headrace.config.resolution import resolve
    from headrace.hub.source import resolve_model
    from headrace.runtime.launch import LocalRuntime

    arguments = {
        "model": order.model,
        "dtype": order.dtype,
        "engine_threads": order.threads,
        "skip_tokenizer_init": True,
    }
    args = resolve(arguments=arguments).args
    source = resolve_model(args.model)
    driver = Driver(lambda on_message: LocalRuntime(args, source, on_message))
    driver.__enter__()  # closed with the process
    num_runs = 0

    def run(prompts: list[list[int]], num_output: int) -> tuple[float, list[list[int]]]:
        nonlocal num_runs
        num_runs += 1
        tasks = [Task(number, prompt, num_output) for number, prompt in enumerate(prompts)]
        record = driver.run(tasks, cache_salt=f"run {num_runs}")  # no run may find the prefixes of another
        assert not record.errors(), record.errors()
        assert not record.num_cached().any()
        return record.duration_s, record.output_ids()

    return run


def open_transformers(order: Order) -> Run:
    import torch

    torch.set_num_threads(order.threads)
    model = load_transformers(order)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False

    def run(prompts: list[list[int]], num_output: int) -> tuple[float, list[list[int]]]:
        begin_s = time.monotonic()
        ids, mask = pad_left(prompts)
        with torch.inference_mode():
            found = model.generate(
                input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=num_output
            )
        outputs = found[:, len(ids[0]) :].tolist()
        seconds = time.monotonic() - begin_s
        assert all(len(each) == num_output for each in outputs), "generate ended early"
        return seconds, outputs

    return run


def load_transformers(order: Order) -> Any:
    """The same file, dequantised at load."""
    import torch
    import transformers

    from headrace.hub.source import resolve_model

    source = resolve_model(order.model)
    dtype = getattr(torch, order.dtype)
    if source.kind == "hf":
        return transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(
        os.fspath(source.path.parent),
        gguf_file=source.path.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=dtype,
    ).eval()


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of one length, and the mask of what is no padding."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return ids, mask


ENGINES = {"headrace": open_headrace, "transformers": open_transformers}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    order = Order(**json.loads(sys.stdin.readline()))
    run = ENGINES[sys.argv[1]](order)
    answer({"ready": True})
    for line in sys.stdin:
        wanted = json.loads(line)
        seconds, outputs = run([order.prompts[number] for number in wanted["run"]], wanted["num_output"])
        answer({"seconds": seconds, "outputs": outputs})
    os._exit(0)  # threads of both engines are idle; nothing is left to be saved


if __name__ == "__main__":
    main()
