"""Log-probabilities of a prompt of 8,192 tokens over a large vocabulary: in bounded memory, and nobody has to wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LENGTH, VOCAB = 8_192, 65_536
WHOLE_BYTES = LENGTH * VOCAB * 4
"""Of logits that were kept all at once."""

SCRIPT = """
import json, resource, sys, time
import torch
from headrace.config.llm_args import LlmArgs
from headrace.llm import LLM
from headrace.params import SamplingParams

torch.set_num_threads(1)
folder, length, vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
args = {"model": folder, "dtype": "float32", "skip_tokenizer_init": True, "engine_threads": 1, "max_batch_size": 4,
        "max_num_tokens": 2048, "scheduler_config": {"context_chunking_policy": "EQUAL_PROGRESS"},
        "kv_cache_config": {"max_tokens": length + 1024}}
with LLM.from_args(LlmArgs.model_validate(args)) as llm:
    llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prompt = [(at * 7919) % vocab for at in range(length)]
    long = llm.generate_async(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    done = []
    while not long.done:
        started = time.monotonic()
        llm.generate([3, 4], SamplingParams(max_tokens=2), use_tqdm=False)
        done.append(time.monotonic() - started)
    values = long.result().outputs[0].prompt_logprobs
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"num": len(values), "grown_bytes": grown * 1024, "beside": len(done), "longest_s": max(done)}))
"""


@pytest.mark.slow
def test_a_long_prompt_over_a_large_vocabulary(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: Any = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 2 * LENGTH}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None, bos_token_id=None)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(LENGTH), str(VOCAB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num"] == LENGTH
    assert found["grown_bytes"] < WHOLE_BYTES / 4, found
    assert found["beside"] >= 2, f"short requests must come through beside it: {found}"
