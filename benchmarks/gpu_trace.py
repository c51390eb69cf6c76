"""What share of its time the GPU waits for the host between steps, by CUDA events around every step of the engine.

    python benchmarks/gpu_trace.py FOLDER [--rows 1,64,256,1024] [--steps 200] [--sampled]

Prompts of 128 tokens, then generation rows alone. Gaps between the kernels of one step are not idle time here: a
captured step is one launch. `--sampled` draws with temperature 0.8 and top_p 0.9 instead of taking the likeliest token.
"""

from __future__ import annotations

import argparse
import random
import statistics

from headrace import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,64,256,1024", help="generation rows, with commas between them")
    parser.add_argument("--steps", type=int, default=200, help="tokens of each request")
    parser.add_argument("--input_len", type=int, default=128)
    parser.add_argument("--max_id", type=int, default=100_000, help="ids of prompts stay below")
    parser.add_argument("--sampled", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.rows.split(",")]
    draw = random.Random(0)
    rules = {"temperature": 0.8, "top_p": 0.9, "seed": 1} if options.sampled else {}
    params = SamplingParams(max_tokens=options.steps, end_id=-1, **rules)
    settings = {
        "max_batch_size": max(sizes),
        "max_num_tokens": 8192,
        "max_seq_len": options.input_len + options.steps + 1,
        "cuda_graph_config": {"max_batch_size": max(sizes), "enable_padding": True},
        "kv_cache_config": {"enable_block_reuse": False},
        "enable_iter_perf_stats": True,
        "max_stats_len": 4 * options.steps + 100,
    }
    print("| rows | steps | device ms a step | idle ms a step | idle |\n|---|---|---|---|---|")
    with LLM(options.model, skip_tokenizer_init=True, **settings) as llm:
        for size in sizes:
            prompts = [[draw.randrange(10, options.max_id) for _ in range(options.input_len)] for _ in range(size)]
            for _ in range(2):  # the first captures
                llm.generate(prompts, params, use_tqdm=False)
                found = llm.get_stats()
            steps = [each for each in found if each["inflightBatchingStats"]["numGenRequests"] == size]
            steps = [each for each in steps if not each["inflightBatchingStats"]["numContextRequests"]]
            busy = [each["forwardMS"] for each in steps]
            idle = [each["deviceIdleMS"] for each in steps]
            share = sum(idle) / (sum(idle) + sum(busy))
            print(
                f"| {size} | {len(steps)} | {statistics.median(busy):.3f} | {statistics.mean(idle):.3f} | {share:.1%} |"
            )


if __name__ == "__main__":
    main()
