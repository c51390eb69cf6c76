"""How far a GPU's greedy tokens follow the CPU engine's, on a real model: rates of first differences.

    python benchmarks/gpu_against_cpu.py smollm2 [--prompts 64] [--tokens 64]

Prompts are pieces of Python's own documentation, as `pydoc_data` carries it. float32 on both sides is expected to be
equal; in 16 bits two tokens may be as likely as each other, so what is shown is how soon that happens. Without a GPU
both sides are this CPU: that proves that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pydoc_data.topics import topics

WORKER = """
import json, sys
from headrace import LLM, SamplingParams
order = json.load(sys.stdin)
with LLM(order["model"], dtype=order["dtype"], max_seq_len=1024, max_batch_size=16) as llm:
    params = SamplingParams(max_tokens=order["tokens"], ignore_eos=True)
    outputs = llm.generate(order["prompts"], params, use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def tokens_of(model: str, prompts: list[str], num_tokens: int, *, dtype: str, is_cpu: bool) -> list[list[int]]:
    """Greedy tokens, by a process of their own: it sees a GPU or none."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if is_cpu else {})
    order = json.dumps({"model": model, "dtype": dtype, "tokens": num_tokens, "prompts": prompts})
    done = subprocess.run(
        [sys.executable, "-c", WORKER], input=order, capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def first_difference(one: list[int], two: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    prompts = [topics[name][:400] for name in sorted(topics)[: options.prompts]]
    expected = tokens_of(options.model, prompts, options.tokens, dtype="float32", is_cpu=True)
    print("| GPU's numbers | equal to the CPU's in float32 | first difference at (mean) | differences a token |")
    print("|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        found = tokens_of(options.model, prompts, options.tokens, dtype=dtype, is_cpu=False)
        at = [first_difference(one, two) for one, two in zip(expected, found, strict=True)]
        differ = sum(each < options.tokens for each in at)
        shown = f"{len(at) - differ} of {len(at)} | {statistics.mean(at):.1f} | {differ / max(sum(at), 1):.4f}"
        print(f"| {dtype} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
