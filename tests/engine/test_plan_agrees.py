"""What `headrace plan` tells of a model is what the engine then has: groups, weights, pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config.llm_args import LlmArgs
from headrace.engine.build import build_model
from headrace.engine.groups import configured_reach, group_layers
from headrace.engine.rank import Rank
from headrace.hub.rank_share import Ranks, heads_of_rank
from headrace.hub.read_shape import read_shape
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext, share_heads
from headrace.quant.none import Dense
from headrace.runtime.forecast import Forecast, Spread, forecast
from headrace.runtime.gpus import Device
from headrace.runtime.settle import settle
from tests.kits.model import TINY, save_tiny

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"head_dim": None},
    "qwen3": {"attention_bias": True},
    "gemma3_text": {},
    "llama, many heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "llama, one KV head": {"num_key_value_heads": 1},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def config_of(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    model_type = name.partition(",")[0]
    declared = AutoConfig.for_model(model_type).to_dict()
    tiny = {key: value for key, value in {**TINY, **MODELS[name]}.items() if key in declared or key in MODELS[name]}
    return AutoConfig.for_model(
        model_type, **{key: value for key, value in tiny.items() if value is not None}
    ).to_dict()


def planned(config: dict[str, Any], args: LlmArgs, *, memory_bytes: int = 1 << 34) -> Forecast:
    ranks = Ranks(args.tensor_parallel_size)
    return forecast(args, read_shape(config), Spread(Device("cpu", memory_bytes, 0), ranks))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("cache", CACHES)
def test_pools_that_are_then_allocated(model_type: str, cache: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path, model_type)
    source = resolve_model(str(tmp_path))
    args = LlmArgs.model_validate({
        "model": str(tmp_path), "dtype": "float32", "max_num_tokens": 16, "max_batch_size": 4,
        "kv_cache_config": {"tokens_per_block": 4, **cache},
    })  # fmt: skip
    engine = Rank(args, source, ParallelContext(), num_valid_ids=None)
    facts = engine.facts
    from headrace.hub.config import read_config

    (stage,) = planned(read_config(source), args, memory_bytes=facts.free_bytes + facts.weight_bytes).stages
    assert stage.facts.groups == facts.groups
    assert (stage.facts.weight_bytes, stage.facts.activation_bytes) == (facts.weight_bytes, facts.activation_bytes)
    settled = settle(args, facts)
    assert stage.settled is not None and stage.settled.sizes == settled.sizes
    engine.allocate(settled.sizes)
    try:
        rows = {row.name: row.size_bytes for row in stage.settled.memory.rows if row.name.startswith("KV: ")}
        assert sum(rows.values()) == engine.memory.pools.size_bytes
        if "max_gpu_total_bytes" in cache:
            assert engine.memory.pools.size_bytes <= cache["max_gpu_total_bytes"]
        assert configured_reach(args.kv_cache_config, longest=facts.max_position) == engine.reach
    finally:
        engine.close()
