"""What windows and states get beside full attention, for models of today: one window a sequence, and a step once."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.kvcache.reuse import blocks_in_flight, most_at_rest
from headrace.runtime.forecast import Stage
from headrace.runtime.settle import Settled
from headrace.runtime.sizing import DEFAULT_AVG_SEQ_LEN
from tests.hub.test_rank_share import QWEN3_NEXT
from tests.runtime.test_forecast import planned

GEMMA_3_27B = {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    "sliding_window_pattern": 6, "vocab_size": 262_208, "max_position_embeddings": 131_072,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201_088, "sliding_window": 128, "max_position_embeddings": 131_072,
}  # fmt: skip
HEAVY, LIGHT = "heavily_compressed_attention", "compressed_sparse_attention"
DEEPSEEK_V4_FLASH = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "hc_mult": 4, "vocab_size": 129_280,
    "max_position_embeddings": 1_048_576, "layer_types": [HEAVY, *[HEAVY, LIGHT] * 21],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3": (GEMMA_3_27B, 1),
    "gpt_oss": (GPT_OSS_20B, 1),
    "deepseek_v4": (DEEPSEEK_V4_FLASH, 4),
    "qwen3_next": (QWEN3_NEXT, 4),
}
"""Configs, and ranks."""


def stage_of(name: str, **args: Any) -> tuple[Stage, Settled]:
    from headrace.hub.rank_share import Ranks

    config, ranks = SHAPES[name]
    (stage,) = planned(config, ranks=Ranks(ranks), tensor_parallel_size=ranks, **args).stages
    assert stage.settled is not None, stage.problem
    return stage, stage.settled


@pytest.mark.parametrize("name", SHAPES)
def test_pools_hold_the_same_sequences(name: str) -> None:
    stage, settled = stage_of(name)
    block, groups = settled.scheduler.tokens_per_block, stage.facts.groups
    usable = dict(zip(groups, (count - 1 for count in settled.sizes.num_blocks), strict=True))
    in_flight = blocks_in_flight(settled.demand.max_tokens_in_flight, block)
    full = {group: count for group, count in usable.items() if group.window is None and not group.is_recurrent}
    assert len(set(full.values())) == 1  # none is left over in one where another is the bound
    num_blocks = next(iter(full.values()))
    for group, count in usable.items():
        if group.window is not None:
            assert count == in_flight + num_blocks * most_at_rest(group, block) // (DEFAULT_AVG_SEQ_LEN // block)
        elif group.is_recurrent:
            assert count == 1  # no snapshots were asked for
    held = {
        settled.demand.sequences_held([group], [count], DEFAULT_AVG_SEQ_LEN)
        for group, count in usable.items()
        if not group.is_recurrent
    }
    assert len(held) == 1


def test_a_window_of_eight_tokens_takes_no_more_than_its_blocks() -> None:
    """The loose values of DeepSeek-V4's light compressor: once more than half of the cache, of 8 tokens a sequence."""
    stage, settled = stage_of("deepseek_v4")
    block = settled.scheduler.tokens_per_block
    sizes = {
        group.window: count * group.block_bytes(block)
        for group, count in zip(stage.facts.groups, settled.sizes.num_blocks, strict=True)
        if group.window is not None or group.every == 4
    }
    loose, entries = sizes[8], sizes[None]
    assert loose < entries / 2


def test_without_reuse_a_batch_is_all_that_windows_serve() -> None:
    (_, kept), (stage, off) = (
        stage_of("gpt_oss", max_batch_size=64, kv_cache_config={"enable_block_reuse": reuse}) for reuse in (True, False)
    )
    window, full = stage.facts.groups
    assert window.window == 128 and full.window is None
    in_flight = blocks_in_flight(off.demand.max_tokens_in_flight, 32)
    assert off.sizes.num_blocks[0] == 1 + 64 * most_at_rest(window, 32) + in_flight < kept.sizes.num_blocks[0]
    assert off.sizes.num_blocks[1] > kept.sizes.num_blocks[1]


def test_a_smaller_step_leaves_more_to_full_attention() -> None:
    (_, large), (_, small) = (stage_of("deepseek_v4", max_num_tokens=count) for count in (16_384, 2048))
    assert small.num_tokens > large.num_tokens
