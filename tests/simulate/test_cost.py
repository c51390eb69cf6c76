"""Operations and bytes of attention, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.config.llm_args import LlmArgs
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import read_shape
from headrace.runtime.forecast import Spread, forecast
from headrace.runtime.gpus import Device
from headrace.seam import GroupSpec
from headrace.simulate.cost import CachePart, Calibration, cost_of
from headrace.simulate.devices import peak_of
from headrace.simulate.work import Ledger, Work
from tests.hub.test_stages import GEMMA_4_E2B
from tests.runtime.test_window_pools import DEEPSEEK_V4_FLASH

SPARSE = {
    "model_type": "deepseek_v32", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 40, "index_head_dim": 12, "index_n_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 10_000,
}  # fmt: skip
POOLED = {
    **SPARSE, "model_type": "glm5_next_text", "index_kpool": 4, "qk_rope_head_dim": 0,
    "layer_types": ["indexed_attention"] * 3, "indexer_types": ["full"] * 3, "mlp_layer_types": ["dense"] * 3,
    "hc_mult": 2, "first_k_dense_replace": None, "linear_head_dim": 8, "linear_num_heads": 2,
}  # fmt: skip


def parts_of(config: dict[str, Any], *, ranks: int = 1) -> tuple[tuple[GroupSpec, ...], tuple[CachePart, ...]]:
    args = LlmArgs.model_validate({"model": "m", "tensor_parallel_size": ranks, "max_batch_size": 8})
    shape, spread = read_shape(config), Spread(Device("h200", 1 << 40, 0), Ranks(ranks))
    planned = forecast(args, shape, spread)
    groups = planned.stages[0].facts.groups
    cost = cost_of(
        shape, config, groups=groups, ranks=spread.ranks, storage=planned.storage, dtype="bfloat16",
        peak=peak_of("h200"), calibration=Calibration(),
    )  # fmt: skip
    return groups, cost.caches


def decoded(groups: tuple[GroupSpec, ...], length: int) -> Work:
    """One token behind `length` - 1."""
    ledger = Ledger(groups, 1)
    ledger.length[0] = length - 1
    work = ledger.decode(np.array([0]), 1)
    return Work(1, 1, 1, *[tuple(int(np.sum(each)) for each in values) for values in (work.pairs, work.reads)])


def flops_and_bytes(groups: tuple[GroupSpec, ...], parts: tuple[CachePart, ...], length: int) -> tuple[float, float]:
    """Of one decode row."""
    work, flops, num_bytes = decoded(groups, length), 0.0, 0.0
    for part, pairs, reads in zip(parts, work.pairs, work.reads, strict=True):
        assert isinstance(pairs, int) and isinstance(reads, int)
        flops += pairs * part.flops + min(pairs, part.top or pairs) * part.chosen_flops
        num_bytes += reads * part.bytes + min(reads, part.top or reads) * part.chosen_bytes
    return flops, num_bytes


@pytest.mark.parametrize("length", [1024, 65_536])
@pytest.mark.parametrize("ranks", [1, 8])
def test_compressed_attention_counts_windows_entries_and_the_indexer(length: int, ranks: int) -> None:
    """DeepSeek-V4: 43 windows of 128, entries of 4 tokens of which 512 are chosen in 21 layers, of 128 in 22."""
    groups, parts = parts_of(DEEPSEEK_V4_FLASH, ranks=ranks)
    heads, dim = 64 / ranks, 512
    flops = 43 * 128 * 4 * heads * dim + 22 * (length / 128) * 4 * heads * dim
    flops += 21 * (min(length / 4, 512) * 4 * heads * dim + length / 4 * 2 * 64 * 128)
    flops += 21 * 2 * 2 * (dim + 128) + 22 * 2 * dim  # a token in each entry that it is part of
    num_bytes = 2 * (43 * 128 * dim + 22 * length / 128 * dim + 21 * (min(length / 4, 512) * dim + length / 4 * 128))
    num_bytes += 2 * 2 * (21 * 8 * 2 * (dim + 128) + 22 * 128 * dim)  # loose values and gates
    found = flops_and_bytes(groups, parts, length)
    assert found == (pytest.approx(flops, rel=0.001), pytest.approx(num_bytes, rel=0.001))


@pytest.mark.parametrize("length", [30, 3000])
def test_chosen_tokens_alone_are_attended_to(length: int) -> None:
    groups, parts = parts_of(SPARSE)
    seen, width = min(length, 40), 2 * 16 + 8
    flops = 3 * (seen * 2 * 4 * width + length * 2 * 2 * 12)
    num_bytes = 3 * 2 * (seen * (16 + 8) + length * 12)
    assert flops_and_bytes(groups, parts, length) == (pytest.approx(flops), pytest.approx(num_bytes))


@pytest.mark.parametrize("length", [32, 3200])
def test_pools_are_scored_and_their_tokens_attended_to(length: int) -> None:
    groups, parts = parts_of(POOLED)
    seen = min(length, 40)
    flops = 3 * (seen * 2 * 4 * 2 * 16 + length / 4 * 2 * 2 * 12 + 4 * (2 * 12 // 4))
    num_bytes = 3 * 2 * (seen * 16 + length / 4 * 12 + 4 * 2 * 12)
    assert flops_and_bytes(groups, parts, length) == (pytest.approx(flops), pytest.approx(num_bytes))


def test_a_prompt_is_bound_by_what_is_chosen() -> None:
    """The time of 200 tokens with 40 chosen each, of which the first 40 see fewer: never more than all pairs."""
    _, (part,) = parts_of(SPARSE)
    pairs, peak = 200 * 201 // 2, peak_of("h200")
    dense = CachePart(part.flops + part.chosen_flops, part.bytes + part.chosen_bytes)
    spent = float(part.seconds(200, pairs, 200, peak))
    assert spent < float(dense.seconds(200, pairs, 200, peak))
    in_turn = part.seconds(200, np.array([pairs]), np.array([200]), peak)
    assert in_turn.tolist() == [spent]


def test_layers_that_share_keys_and_values_read_them_too() -> None:
    """Gemma 4 E2B: 35 layers attend, 15 keep something."""
    groups, parts = parts_of(GEMMA_4_E2B)
    by_window = {group.window: part for group, part in zip(groups, parts, strict=True)}
    assert by_window[512].flops == 28 * 4 * 8 * 256 and by_window[None].flops == 7 * 4 * 8 * 512
    assert by_window[512].bytes == 28 * 2 * 256 * 2 and by_window[None].bytes == 7 * 2 * 512 * 2


def test_prompts_attend_over_unfolded_latents_and_decode_over_latents() -> None:
    sparse = ("index_topk", "index_head_dim", "index_n_heads")
    dense = {key: value for key, value in SPARSE.items() if key not in sparse} | {"model_type": "deepseek_v3"}
    dense["kv_lora_rank"] = 64
    _, (part,) = parts_of(dense)
    layers, heads = 3, 4
    absorbed, unfolded, unfolding = 2 * 64 + 8, 8 + 8 + 8, (8 + 8) * 64

    def flops(num_tokens: int, start: int) -> float:
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        without_memory = replace(peak_of("h200"), bytes_per_s=float("inf"))
        return part.seconds(num_tokens, pairs, start + num_tokens, without_memory) * without_memory.flops

    scale = 2 * layers * heads
    assert flops(1, 4095) == pytest.approx(scale * 4096 * absorbed)
    assert flops(100, 0) == pytest.approx(scale * 5050 * unfolded)
    assert flops(100, 1000) == pytest.approx(scale * (105_050 * unfolded + 1000 * unfolding))
    assert flops(2, 1000) == pytest.approx(scale * 2003 * absorbed)
