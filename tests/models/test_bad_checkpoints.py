"""Every file of the models room refuses, by name, a config that its checkpoint contradicts or that it doesn't know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from headrace import plugins
from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config
from headrace.hub.source import resolve_model
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.recipes import read_recipes
from headrace.quant.none import Dense
from tests.kits.model import load_model, save_tiny
from tests.kits.tiny import ROWS, tiny_model

FILE = "model.safetensors"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
TYPES = [
    model_type
    for name in plugins.names("models")
    for model_type in plugins.load("models", name).model_types
    if model_type in CONFIG_MAPPING and "text_config" not in CONFIG_MAPPING[model_type]().to_dict()
]
TYPES += [name for name, row in ROWS.items() if row.of or row.oracle]


@pytest.fixture(scope="module", params=sorted(set(TYPES)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("checkpoint")
    save_tiny(path, request.param)
    return path


def refusal(folder: Path, target: Path, config: Mapping[str, Any]) -> str:
    """What loading says with another config."""
    (target / "config.json").write_text(json.dumps(config))
    (target / FILE).hardlink_to(folder / FILE)
    with pytest.raises(ValueError) as raised:
        load_model(resolve_model(str(target)))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def stated(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def spiral(value: Any) -> Any:
    """The config with every rope type another one."""
    if isinstance(value, dict):
        return {key: "spiral" if key in ("rope_type", "type") else spiral(each) for key, each in value.items()}
    return value


def test_sizes_that_contradict_the_tensors(folder: Path, tmp_path: Path) -> None:
    config = stated(folder)
    said = refusal(folder, tmp_path, config | {"vocab_size": config["vocab_size"] + 1})
    assert "of a wrong shape: " in said and "embed" in said


SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "kv_lora_rank",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_other_sizes_that_contradict_the_tensors(folder: Path, tmp_path: Path, key: str) -> None:
    config = stated(folder)
    if not isinstance(config.get(key), int):
        pytest.skip("the config has no such size")
    if is_unread(config, key):
        pytest.skip("no tensor of this config has that size")
    said = refusal(folder, tmp_path, config | {key: 2 * config[key]})
    assert "of a wrong shape: " in said or key in said, said


def is_unread(config: Mapping[str, Any], key: str) -> bool:
    """Latent attention has other sizes of heads; all of Qwen3-Next's layers have experts here."""
    if key == "intermediate_size":
        return config["model_type"] == "qwen3_next"
    return key in ("num_key_value_heads", "head_dim") and "kv_lora_rank" in config


def test_more_layers_than_the_checkpoint_has(folder: Path, tmp_path: Path) -> None:
    config = stated(folder)
    if "num_hidden_layers" not in config:
        pytest.skip("its layers are counted by their kinds")
    more = {key: [*value, value[-1]] for key, value in config.items() if is_by_layer(value, config)}
    said = refusal(folder, tmp_path, config | more | {"num_hidden_layers": config["num_hidden_layers"] + 1})
    assert "missing: " in said or str(config["num_hidden_layers"] + 1) in said


def is_by_layer(value: Any, config: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and len(value) == config["num_hidden_layers"]


def test_unknown_rope_types(folder: Path, tmp_path: Path) -> None:
    config = stated(folder)
    turned = spiral(config)
    if turned == config or not build_model(config, plain_factory()).ropes(torch.arange(1)):
        pytest.skip("nothing is turned")
    assert "'spiral'" in refusal(folder, tmp_path, turned)


def test_expert_counts_that_do_not_match(folder: Path, tmp_path: Path) -> None:
    config = stated(folder)
    keys = [key for key in EXPERT_KEYS if config.get(key)]
    if not keys:
        pytest.skip("it has no experts")
    # Twice as many: what equal groups of them need fits.
    said = refusal(folder, tmp_path, config | {key: 2 * config[key] for key in keys})
    assert any(word in said for word in ("expert", "router", "gate", "correction")), said


def test_experts_that_a_recipe_can_not_store(folder: Path) -> None:
    config = read_config(resolve_model(str(folder)))
    if not any(config.get(key) for key in EXPERT_KEYS):
        pytest.skip("it has no experts")
    odd: Any = type("Odd", (), {"stored": Dense.stored})()
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: odd)
    with pytest.raises(ValueError, match="experts can't be stored as Odd: use an unquantised checkpoint"):
        build_model(config, factory)


UNSERVED = [
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "fp8", "weight_block_size": [64, 64]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
]


@pytest.mark.parametrize("stated", UNSERVED, ids=lambda stated: stated["quant_method"])
def test_quantisations_that_are_not_served(stated: dict[str, Any]) -> None:
    """Before any model is built, so whatever it is."""
    with pytest.raises(ValueError, match="quantization_config: .* not served") as raised:
        read_recipes({"quantization_config": stated}, hf_quant_config=None, force_dynamic=False)
    assert "\n" not in str(raised.value)


def test_quantisations_that_a_layer_does_not_take(folder: Path, tmp_path: Path) -> None:
    """Experts in MXFP4 where the file has no names for them; FP8 that the tensors aren't in."""
    config = read_config(resolve_model(str(folder)))
    for quantised, wanted in (
        ({"quant_method": "mxfp4"}, r"gate_up in MXFP4 is not served for|tensors missing: .*blocks"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "tensors missing: .*scale"),
    ):
        if quantised["quant_method"] == "mxfp4" and not has_experts(config):
            continue
        recipes = read_recipes({"quantization_config": quantised}, hf_quant_config=None, force_dynamic=False)
        experts = ExpertsSetup(recipes.of_experts)
        factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=experts, plain=recipes.plain)
        with pytest.raises(ValueError, match=wanted) as raised:
            load_weights(build_model(config, factory), resolve_model(str(folder)), progress=False)
        assert "\n" not in str(raised.value)


UNKNOWN = [
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "'softmax'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "'sigmoid'"),
    ("deepseek_v32", {"topk_method": "greedy"}, "'noaux_tc'"),
    ("deepseek_v4", {"hidden_act": "gelu"}, "'silu'"),
    ("glm5_next_text", {"hidden_act": "relu"}, "'silu'"),
    ("glm5_next_text", {"mla_use_nope": False}, "True"),
    ("glm5_next_text", {"index_kpool_compress": False}, "True"),
    ("glm4_moe", {"scoring_func": "softmax"}, "'sigmoid'"),
    ("minimax_m2", {"scoring_func": "softmax"}, "'sigmoid'"),
    ("minimax_m3_vl_text", {"use_gemma_norm": False}, "True"),
    ("minimax_m3_vl_text", {"attention_output_gate": True}, "False"),
    ("kimi_linear", {"hidden_act": "gelu"}, "'silu'"),
    ("kimi_linear", {"mla_use_nope": False}, "True"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'sigmoid'"),
    ("qwen3_next", {"hidden_act": "gelu"}, "'silu'"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "'silu'"),
    ("falcon_h1", {"hidden_act": "gelu"}, "'silu'"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "'silu'"),
    ("mamba2", {"hidden_act": "gelu"}, "'silu'"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "'silu'"),
    ("gemma2", {"use_bidirectional_attention": True}, "False"),
]
"""A key that says what is computed, a value that nothing here computes, and the one that is."""


@pytest.mark.parametrize(("model_type", "changes", "known"), UNKNOWN, ids=lambda part: str(part))
def test_what_is_not_computed_is_refused(model_type: str, changes: dict[str, Any], known: str) -> None:
    ((key, value),) = changes.items()
    config = {"model_type": model_type, "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 8,
              "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8, "first_k_dense_replace": 0,
              "layers_block_type": ["mamba"]}  # fmt: skip
    factory = LayerFactory(dtype=torch.bfloat16, recipe=lambda _: Dense(), device="meta")
    with pytest.raises(ValueError) as raised:
        build_model({**config, **changes}, factory)
    assert str(raised.value) == f"config.json: {key} {value!r} is not served: only {known} is"


def has_experts(config: Mapping[str, Any]) -> bool:
    return build_model(config, plain_factory()).has_experts and any(config.get(key) for key in EXPERT_KEYS)


def plain_factory() -> LayerFactory:
    dense = Dense()
    return LayerFactory(dtype=torch.float32, recipe=lambda _: dense)


def test_every_row_is_here() -> None:
    assert {name for name in ROWS if not tiny_model(name).oracle} <= set(TYPES)
