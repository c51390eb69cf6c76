"""Time to the first token of prompts that share a long prefix, with and without block reuse, interleaved in one run.

    python benchmarks/prefix_reuse.py smollm2 [--prefix 2000] [--tail 16] [--repeats 7] [--max_seq_len N]

Each prompt has the shared prefix and a tail of its own. Without reuse the same engine is asked under a new cache salt
each time. Prints both medians and their ratio.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from headrace import LLM, SamplingParams


def first_token_times(
    llm: LLM, *, prefix: int, tail: int, repeats: int, max_id: int = 10_000
) -> tuple[list[float], list[float], list[int]]:
    """-> seconds without reuse, with it, and the numbers of cached tokens that were seen"""
    draw = random.Random(0)
    shared = [draw.randrange(100, max_id) for _ in range(prefix)]
    params = SamplingParams(max_tokens=1, end_id=-1)

    def first_token_s(salt: str) -> tuple[float, int]:
        prompt = shared + [draw.randrange(100, max_id) for _ in range(tail)]
        begin_s = time.perf_counter()
        output = llm.generate(prompt, params, use_tqdm=False, cache_salt=salt)
        assert not isinstance(output, list)
        return time.perf_counter() - begin_s, output.cached_tokens

    first_token_s("shared")
    cold, warm, cached = [], [], set()
    for at in range(repeats):
        cold.append(first_token_s(f"alone {at}")[0])
        seconds, tokens = first_token_s("shared")
        warm.append(seconds)
        cached.add(tokens)
    return cold, warm, sorted(cached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, default=2000, help="shared tokens")
    parser.add_argument("--tail", type=int, default=16, help="further tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max_num_tokens", type=int, default=8192)
    options = parser.parse_args()
    with LLM(options.model, skip_tokenizer_init=True, max_batch_size=4, max_num_tokens=options.max_num_tokens) as llm:
        cold, warm, cached = first_token_times(llm, prefix=options.prefix, tail=options.tail, repeats=options.repeats)
    without, reused = statistics.median(cold), statistics.median(warm)
    print(f"prefix {options.prefix}, tail {options.tail}, cached tokens {cached}")
    print(f"without reuse {without * 1000:.1f} ms, with {reused * 1000:.1f} ms, ratio {reused / without:.3f}")


if __name__ == "__main__":
    main()
