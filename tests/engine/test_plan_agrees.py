"""What `headrace plan` tells of a model is what the engine then has: groups, weights, pools."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config.llm_args import LlmArgs
from headrace.engine.build import build_model
from headrace.engine.groups import configured_reach, group_layers
from headrace.engine.rank import Rank
from headrace.hub.config import read_config
from headrace.hub.rank_share import Ranks, heads_of_rank
from headrace.hub.read_shape import read_shape
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext, share_heads
from headrace.quant.none import Dense
from headrace.runtime.forecast import Forecast, Spread, Stage, forecast
from headrace.runtime.gpus import Device
from headrace.runtime.settle import settle
from tests.kits.model import TINY, save_tiny
from tests.kits.tiny import MINISTRAL3_ROPE, tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"head_dim": None},
    "qwen3": {"attention_bias": True},
    "gemma3_text": {},
    "gemma2": {},
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_text, small": dict(tiny_model("gemma4_text small").changes),
    "gemma4_text, experts": dict(tiny_model("gemma4_text experts").changes),
    "phi3": {"head_dim": None},
    "olmo2": {},
    "olmo3": {},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "cohere2": {},
    "exaone4": {},
    "smollm3": {"no_rope_layers": [0, 1, 0]},
    "seed_oss": {},
    "glm4": {},
    "ministral": {},
    "ministral3": {"rope_parameters": MINISTRAL3_ROPE},
    "nemotron": {"attention_bias": True},
    "hunyuan_v1_dense": {},
    "llama, many heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "llama, one KV head": {"num_key_value_heads": 1},
}
MODELS |= {
    name: dict(tiny_model(name).changes)
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "llama4_text", "gpt_oss")
}
HYBRIDS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "mamba2", "nemotron_h", "granitemoehybrid",
    "glm5_next_text", "falcon_h1",
)  # fmt: skip
MODELS |= {name: dict(tiny_model(name).changes) for name in HYBRIDS}
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text", "deepseek_v4")
MODELS |= {name: dict(tiny_model(name).changes) for name in LATENT}
MODELS["deepseek_v3, plain queries, biases"] = MODELS["deepseek_v3"] | {"q_lora_rank": None, "attention_bias": True}
MODELS["granitemoehybrid, dense"] = MODELS["granitemoehybrid"] | {"num_local_experts": 0, "mamba_n_groups": 2}
MODELS |= {f"falcon_h1, {form}": dict(tiny_model(f"falcon_h1 {form}").changes) for form in ("norm",)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def config_of(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    model_type = name.partition(",")[0]
    declared = AutoConfig.for_model(model_type).to_dict()
    wanted = copy.deepcopy({**TINY, **MODELS[name]})  # some configs write to the lists that they are given
    tiny = {key: value for key, value in wanted.items() if key in declared or key in MODELS[name]}
    return AutoConfig.for_model(
        model_type, **{key: value for key, value in tiny.items() if value is not None}
    ).to_dict()


def planned(config: dict[str, Any], args: LlmArgs, *, memory_bytes: int = 1 << 34) -> Forecast:
    ranks = Ranks(args.tensor_parallel_size)
    return forecast(args, read_shape(config), Spread(Device("cpu", memory_bytes, 0), ranks))


SIZES = [(name, size) for name in MODELS for size in (1, 2, 4) if size < 4 or name.partition(",")[0] not in HYBRIDS]
"""Heads of recurrent layers come in two groups."""


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_weights_and_groups_of_every_rank(name: str, size: int) -> None:
    config = config_of(name)
    args = LlmArgs(model="m", dtype="bfloat16", tensor_parallel_size=size)
    (stage,) = planned(config, args).stages
    recipe = Dense()
    held: list[int] = []
    for rank in range(size):
        factory = LayerFactory(dtype=torch.bfloat16, recipe=lambda _: recipe, parallel=ParallelContext(rank, size))
        model = build_model(config, factory)
        held.append(model.weight_map().weight_bytes)
        groups = group_layers(model.layers, torch.bfloat16)
        assert groups == stage.facts.groups
        assert model.max_position == stage.facts.max_position and model.vocab_size == stage.facts.vocab_size
    assert stage.facts.weight_bytes == max(held)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (12, 3), (6, 6)])
def test_heads_are_dealt_as_layers_deal_them(heads: int, kv_heads: int, size: int) -> None:
    try:
        shares = [share_heads(heads, kv_heads, rank=rank, size=size) for rank in range(size)]
    except ValueError as error:
        with pytest.raises(ValueError, match="tensor_parallel_size") as caught:
            heads_of_rank(heads, kv_heads, size)
        assert str(caught.value) == str(error)
        return
    most = (max(share.num_heads for share in shares), max(share.num_kv_heads for share in shares))
    assert heads_of_rank(heads, kv_heads, size) == most


CACHES: list[dict[str, Any]] = [
    {"max_gpu_total_bytes": 200_000},
    {"max_tokens": 512, "dtype": "bfloat16"},
    {"max_tokens": 256, "max_attention_window": [8, 1000], "sink_token_length": 2, "avg_seq_len": 100},
    {"max_gpu_total_bytes": 300_000, "host_cache_size": 100_000, "dtype": "float16"},
]


STATE_CACHES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_next", 1, {"max_tokens": 512, "mamba_ssm_cache_dtype": "bfloat16"}),
    ("qwen3_next", 2, {"max_gpu_total_bytes": 200_000, "mamba_state_config": {"periodic_snapshot_interval": 16}}),
    ("nemotron_h", 2, {"max_tokens": 512, "mamba_ssm_cache_dtype": "float16", "mamba_state_cache_interval": 8}),
    ("mamba2", 1, {"max_tokens": 512, "mamba_state_config": {"additional_snapshot_offsets_from_end": [8]}}),
    ("granitemoehybrid", 2, {"max_tokens": 512, "host_cache_size": 100_000}),
]


@pytest.mark.parametrize(("model_type", "size", "cache"), STATE_CACHES)
def test_states_that_are_then_allocated(model_type: str, size: int, cache: dict[str, Any], tmp_path: Path) -> None:
    """The memory table's rows of live states and of snapshots are what a rank takes."""
    engine, forecasted = open_planned(model_type, cache, tmp_path, tensor_parallel_size=size)
    try:
        assert forecasted.settled is not None
        rows = {row.name: row for row in forecasted.settled.memory.rows}
        live = engine.memory.states.size_bytes
        assert rows["recurrent states"].size_bytes == live > 0
        (group,) = [group for group in engine.groups if group.is_recurrent]
        assert group.dtype == cache.get("mamba_ssm_cache_dtype", "float32")
        assert live == (forecasted.settled.sizes.num_slots + 1) * group.state_bytes
    finally:
        engine.close()


def open_planned(model_type: str, cache: dict[str, Any], folder: Path, **changes: Any) -> tuple[Rank, Stage]:
    """The first rank with its pools, and what was planned; both agree on groups, weights and pools."""
    save_tiny(folder, model_type)
    source = resolve_model(str(folder))
    args = LlmArgs.model_validate({
        "model": str(folder), "dtype": "float32", "max_num_tokens": 16, "max_batch_size": 4,
        "kv_cache_config": {"tokens_per_block": 4, **cache}, **changes,
    })  # fmt: skip
    engine = Rank(args, source, ParallelContext(0, args.tensor_parallel_size), num_valid_ids=None)
    facts = engine.facts
    (stage,) = planned(read_config(source), args, memory_bytes=facts.free_bytes + facts.weight_bytes).stages
    assert stage.facts.groups == facts.groups
    assert (stage.facts.weight_bytes, stage.facts.activation_bytes) == (facts.weight_bytes, facts.activation_bytes)
    settled = settle(args, facts)
    assert stage.settled is not None and stage.settled.sizes == settled.sizes
    engine.allocate(settled.sizes)
    rows = [row.size_bytes for row in stage.settled.memory.rows if row.name.startswith(("KV: ", "snapshots: "))]
    assert sum(rows) == engine.memory.pools.size_bytes
    assert configured_reach(args.kv_cache_config, longest=facts.max_position) == engine.reach
    return engine, stage


PARTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v4", {"max_gpu_total_bytes": 2_000_000}),
    ("deepseek_v4", {"max_tokens": 512, "dtype": "bfloat16"}),
    ("glm5_next_text", {"max_tokens": 256, "host_cache_size": 100_000}),
    ("gpt_oss", {"max_gpu_total_bytes": 400_000, "enable_block_reuse": False}),
    ("qwen3_next", {"max_gpu_total_bytes": 400_000, "mamba_state_config": {"periodic_snapshot_interval": 16}}),
]
"""Of layers in several groups, of windows that nobody reuses, of states."""


@pytest.mark.parametrize(
    ("model_type", "cache"), [(name, cache) for name in ("llama", "gemma3_text") for cache in CACHES] + PARTS
)
def test_pools_that_are_then_allocated(model_type: str, cache: dict[str, Any], tmp_path: Path) -> None:
    engine, _ = open_planned(model_type, cache, tmp_path)
    try:
        if "max_gpu_total_bytes" in cache:
            assert engine.memory.pools.size_bytes <= cache["max_gpu_total_bytes"]
    finally:
        engine.close()
