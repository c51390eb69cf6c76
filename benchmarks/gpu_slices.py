"""Time of one layer of models that are too large for one GPU: the cases V3 and Q35 of `gpu.py`.

Two slices of different depth are run; a layer is what the deeper one takes longer, by layers. So embedding, head and
sampling cancel out, and so does what a step costs beside its layers. Weights are drawn, and so is the routing.

Floors are those of `headrace simulate`, at the rates that other kernels reach on this card: bytes at 4.2 TB/s, products
at 790 TFLOP/s in bfloat16 and twice that in FP8.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import random_checkpoint

from headrace import LLM, SamplingParams
from headrace.config.llm_args import LlmArgs
from headrace.hub.config import read_config
from headrace.hub.rank_share import Ranks
from headrace.hub.source import resolve_model
from headrace.runtime.forecast import Spread
from headrace.runtime.gpus import gpu_named
from headrace.seam import GroupSpec
from headrace.simulate.cost import Calibration
from headrace.simulate.devices import Peak
from headrace.simulate.model import model_of
from headrace.simulate.work import Work

# Qwen3.5-397B-A17B: hidden size, layers, experts as published; heads and inner sizes are chosen to give its totals.
QWEN_3_5 = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 4096,
    "num_hidden_layers": 60,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_scaling": None,
}
SLICES = {
    "V3": (random_checkpoint.SHAPES["deepseek-v3-slice"], "fp8_block", (2, 4)),
    "Q35": (QWEN_3_5, "none", (4, 8)),
}
"""Shapes, layouts of `random_checkpoint`, and layers: of DeepSeek-V3 the first is dense, the others have experts; of
Qwen3.5 each fourth attends, the others are recurrent."""
TINY = {
    "V3": {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4,
           "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
           "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 16, "vocab_size": 512},
    "Q35": {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "vocab_size": 512, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}  # fmt: skip
RATES = Peak(790e12, 4.2e12, 450e9, True)
DECODE = ((1, 4096), (64, 1024), (256, 1024))
CHUNK, PROMPT = 8192, 32768
NUM_STEPS = 24
"""Of decoding, once all prompts are computed."""

Times = dict[str, float]


def slices(name: str, *, is_tiny: bool) -> dict[str, Any]:
    """{what: "measured us (floor us)"} of a layer."""
    shape, quant, depths = SLICES[name]
    sizes = shape | (TINY[name] if is_tiny else {})
    measured: list[Times] = []
    floors: list[Times] = []
    for depth in depths:
        with tempfile.TemporaryDirectory() as folder:
            random_checkpoint.write_config(Path(folder), sizes | {"num_hidden_layers": depth}, quant=quant)
            with _open(folder, is_tiny) as llm:
                measured.append(dict(_times(llm, is_tiny)))
            floors.append(dict(_floors(Path(folder), is_tiny)))
    more = depths[1] - depths[0]

    def layer_us(times: list[Times], what: str) -> float:
        return (times[1][what] - times[0][what]) / more * 1e6

    return {what: f"{layer_us(measured, what):.1f} ({layer_us(floors, what):.1f})" for what in measured[0]}


def _cases(is_tiny: bool) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """(rows and contexts of decoding, tokens of a chunk, of a prompt)"""
    return (((1, 16), (2, 16)), 16, 64) if is_tiny else (DECODE, CHUNK, PROMPT)


def _open(folder: str, is_tiny: bool) -> LLM:
    decode, chunk, prompt = _cases(is_tiny)
    most = max(rows for rows, _ in decode)
    tokens = max(prompt, *(rows * (context + rows * context // chunk + NUM_STEPS) for rows, context in decode))
    return LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_batch_size=most,
        max_num_tokens=chunk,
        max_seq_len=prompt + 2 * NUM_STEPS,
        cuda_graph_config={"batch_sizes": [rows for rows, _ in decode], "enable_padding": True},
        kv_cache_config={"enable_block_reuse": False, "max_tokens": tokens + 64 * most},
        enable_iter_perf_stats=True,
        max_stats_len=1 << 16,
    )


def _times(llm: LLM, is_tiny: bool) -> Iterator[tuple[str, float]]:
    """Seconds of a step on the device."""
    decode, chunk, prompt = _cases(is_tiny)
    draw = random.Random(0)

    def steps(rows: int, length: int, num: int) -> list[dict[str, Any]]:
        prompts = [[draw.randrange(10, 250) for _ in range(length)] for _ in range(rows)]
        llm.generate(prompts, SamplingParams(max_tokens=num, end_id=-1), use_tqdm=False)
        return [each | each["inflightBatchingStats"] for each in llm.get_stats()]

    for rows, context in decode:
        num = rows * context // chunk + NUM_STEPS
        found = steps(rows, context - num // 2, num)
        found = [each for each in found if each["numGenRequests"] == rows and not each["numContextRequests"]]
        yield f"decode {rows} x {context}", statistics.median(each["forwardMS"] for each in found) / 1000
    for _ in range(2):
        chunks = [each for each in steps(1, prompt, 1) if each["numContextRequests"]]
    assert len(chunks) == prompt // chunk, "a prompt was cut into other chunks"
    yield f"prefill {chunk}", chunks[0]["forwardMS"] / 1000
    yield f"prefill the last {chunk} of {prompt}", chunks[-1]["forwardMS"] / 1000


def _floors(folder: Path, is_tiny: bool) -> Iterator[tuple[str, float]]:
    decode, chunk, prompt = _cases(is_tiny)
    args = LlmArgs(model=str(folder), max_seq_len=prompt + 64)
    model = model_of(
        args, read_config(resolve_model(str(folder))), Spread(gpu_named("h200", num_ranks=1), Ranks()), Calibration()
    )
    cost = replace(model.cost, peak=RATES)

    def floor_s(rows: int, count: int, start: int) -> float:
        tokens, pairs = rows * count, rows * (count * start + count * (count + 1) // 2)
        groups: tuple[GroupSpec, ...] = model.facts.groups
        by_group = [(tokens, rows) if group.is_recurrent else (pairs, rows * (start + count)) for group in groups]
        work = Work(rows, tokens, rows, tuple(pair for pair, _ in by_group), tuple(read for _, read in by_group))
        return cost.linear_s(work) + float(cost.attention_s(work))

    for rows, context in decode:
        yield f"decode {rows} x {context}", floor_s(rows, 1, context)
    yield f"prefill {chunk}", floor_s(1, chunk, 0)
    yield f"prefill the last {chunk} of {prompt}", floor_s(1, chunk, prompt - chunk)
