"""For every model type there is: what `headrace plan` counts of its cache, a token and a sequence, is what is
allocated, and its weights are those that are loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.config.llm_args import LlmArgs
from headrace.engine.backends import Backends
from headrace.engine.build import build_model, known_model_types
from headrace.engine.groups import group_layers
from headrace.engine.pools import KvPools
from headrace.engine.states import States, state_specs
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import read_shape
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.quant.none import Dense
from headrace.runtime.forecast import Spread, forecast
from headrace.runtime.gpus import Device
from tests.kits.model import tiny_config
from tests.kits.tiny import ROWS, WRAPPERS, tiny_model
from tests.kits.tiny_kimi_k3 import KIMI_K3
from tests.models.test_contract import skip_unless_known

FORMS = [name for name, row in ROWS.items() if row.of]
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 32, 3, 2


def config_of(name: str) -> dict[str, Any]:
    """name: a model type, or another form of one."""
    if name == "kimi_k3":
        return {"model_type": name, "text_config": KIMI_K3}
    if name not in WRAPPERS:
        return tiny_config(name).to_dict() | {"model_type": tiny_model(name).of or name}
    return {"model_type": name, "text_config": tiny_config(WRAPPERS[name]).to_dict(), "vision_config": {}}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [*sorted(known_model_types()), *FORMS])
def test_bytes_are_those_that_are_allocated(name: str, size: int) -> None:
    if name != "kimi_k3" and name not in WRAPPERS:
        skip_unless_known(name)
    config = config_of(name)
    args = LlmArgs(model="m", dtype="bfloat16", tensor_parallel_size=size)
    (stage,) = forecast(args, read_shape(config), Spread(Device("cpu", 1 << 34, 0), Ranks(size))).stages
    dense = Dense()
    parallel = ParallelContext(0, size)
    model = build_model(config, LayerFactory(dtype=torch.bfloat16, recipe=lambda _: dense, parallel=parallel))
    assert model.weight_map().weight_bytes == stage.facts.weight_bytes
    assert (model.max_position, model.vocab_size) == (stage.facts.max_position, stage.facts.vocab_size)
    groups = group_layers(model.layers, torch.bfloat16)
    assert groups == stage.facts.groups
    pools = KvPools(groups, [NUM_BLOCKS] * len(groups), block_size=BLOCK_SIZE, backends=Backends())
    states = States(groups, state_specs(model.layers), num_slots=NUM_SLOTS)
    for group, arena in zip(stage.facts.groups, pools.arenas):
        per_block = group.state_bytes if group.is_recurrent else group.block_bytes(BLOCK_SIZE)
        assert arena.nbytes == NUM_BLOCKS * per_block
        if not group.is_recurrent:
            assert group.block_bytes(BLOCK_SIZE) == BLOCK_SIZE * group.bytes_per_token or group.every > 1
    live = sum(group.state_bytes for group in stage.facts.groups)
    assert states.size_bytes == (NUM_SLOTS + 1) * live


def planned(config: dict[str, Any]) -> tuple[int, Any, int]:
    """(bytes of weights, groups, positions) by `headrace plan`"""
    args = LlmArgs(model="m", dtype="bfloat16")
    (stage,) = forecast(args, read_shape(config), Spread(Device("cpu", 1 << 34, 0), Ranks(1))).stages
    return stage.facts.weight_bytes, stage.facts.groups, stage.facts.max_position


def built(config: dict[str, Any]) -> tuple[int, Any, int]:
    """The same of the model."""
    dense = Dense()
    model = build_model(config, LayerFactory(dtype=torch.bfloat16, recipe=lambda _: dense, device="meta"))
    return model.weight_map().weight_bytes, group_layers(model.layers, torch.bfloat16), model.max_position


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "changes", "positions"),
    [
        ("qwen3", {"rope_parameters": YARN}, 512),
        ("qwen3", {"rope_parameters": None, "rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, 128),
        ("llama", {"rope_parameters": {**YARN, "rope_type": "linear"}}, 512),
        ("llama", {"rope_parameters": {**YARN, "factor": None, "original_max_position_embeddings": 16}}, 128),
        ("deepseek_v3", {"rope_parameters": YARN}, 512),
        ("hunyuan_v1_dense", {}, 128),
        ("gemma3_text", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 128),
        ("granitemoehybrid", {"rope_parameters": YARN}, 128),
    ],
)
def test_positions_of_stretched_ropes(name: str, changes: dict[str, Any], positions: int) -> None:
    config = {**config_of(name), **changes}
    assert planned(config)[-1] == built(config)[-1] == positions


LEFT_OUT = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "n_routed_experts", "num_experts", "num_local_experts",
    "n_shared_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "dense_intermediate_size",
    "head_dim", "num_key_value_heads", "linear_key_head_dim", "ssm_state_size", "index_n_heads", "mlp_hidden_act",
)  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "gpt_oss",
                                  "kimi_linear", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "qwen2_moe", "qwen3",
                                  "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])  # fmt: skip
def test_keys_that_a_config_leaves_out(name: str) -> None:
    """Both halves take the same for them."""
    skip_unless_known(name)
    config = config_of(name)
    for key in LEFT_OUT:
        if key in config:
            shorter = {other: value for other, value in config.items() if other != key}
            try:
                wanted = built(shorter)
            except ValueError:  # the model needs it
                continue
            assert planned(shorter) == wanted, key


def test_kinds_that_a_config_does_not_list() -> None:
    """Both halves give a layer the same kind, in a model long enough to tell the rules apart."""
    lacking = {"layer_types", "layers_block_type"}
    for name in sorted(known_model_types()):
        whole = config_of(name)
        text = whole.get("text_config", whole)
        count = text.get("num_hidden_layers")
        kept = {
            key: value
            for key, value in text.items()
            if key not in lacking and not (isinstance(value, list) and len(value) == count)
        }
        for changes in ({}, {"use_sliding_window": True, "max_window_layers": 5}):
            changed = {**kept, "num_hidden_layers": 13, **changes}
            config = {**whole, "text_config": changed} if text is not whole else changed
            try:
                wanted = built(config)
            except ValueError:  # the model needs the list
                continue
            assert planned(config) == wanted, f"{name} {changes}"


LISTED = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 8}
AGREED: list[tuple[str, dict[str, Any]]] = [
    *((name, LISTED | {"use_sliding_window": flag})
      for name in ("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
      for flag in (True, False) if (name, flag) != ("qwen2_moe", False)),
    *((name, {"n_shared_experts": count}) for name in ("deepseek_v3", "deepseek_v4", "nemotron_h") for count in (1, 2)),
    *(("gemma4_text", {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "enable_moe_block": flag})
      for flag in (True, False)),
    ("glm5_next_text", {"mlp_layer_types": None, "first_k_dense_replace": 1}),
    *(("qwen2_moe", {"qkv_bias": flag}) for flag in (True, False)),
    *((name, {"attention_bias": flag}) for name in ("gpt_oss", "phi3", "qwen3") for flag in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), AGREED)
def test_keys_that_some_types_do_not_read(name: str, changes: dict[str, Any]) -> None:
    skip_unless_known(name)
    config = config_of(name) | changes
    assert planned(config) == built(config)
