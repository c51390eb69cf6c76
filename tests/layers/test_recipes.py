"""What checkpoints state about their quantisation, and which recipe each linear gets."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.layers.decoder import PRE_NORM_RULES
from headrace.layers.experts import expert_rules
from headrace.layers.recipes import read_recipes
from headrace.layers.stacked import stacked_names
from headrace.layers.weights import LinearNames, WeightMap
from headrace.quant.fp8 import Fp8
from headrace.quant.fp8_block import Fp8Block
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.int4_weight import Int4Weight
from headrace.quant.mxfp4 import Mxfp4
from headrace.quant.none import Dense
from headrace.quant.port import ExpertsRecipe


def linear(name: str, *slots: str) -> LinearNames:
    return WeightMap((), PRE_NORM_RULES).linear_names(name, slots or ("",))


DOWN = linear("layers.1.mlp.down")
HEAD = LinearNames("head")


def quantised(**stated: Any) -> dict[str, Any]:
    return {"quantization_config": stated}


def compressed(weights: dict[str, Any], inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    fp8 = {"type": "float", "num_bits": 8}
    group = {"targets": ["Linear"], "weights": {**fp8, **weights}, "input_activations": {**fp8, **inputs}}
    return quantised(quant_method="compressed-tensors", config_groups={"group_0": group}, ignore=["lm_head"], **more)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, Dense),
        (quantised(quant_method="modelopt", quant_algo="FP8"), Fp8),
        (quantised(quant_method="fp8", activation_scheme="static"), Fp8),
        (quantised(quant_method="fp8", activation_scheme="dynamic"), Fp8Dynamic),
        (quantised(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]), Fp8Block),
        (compressed({"strategy": "channel"}, {"dynamic": True}), Fp8Dynamic),
        (compressed({"strategy": "tensor"}, {"dynamic": False}), Fp8),
        (compressed({"strategy": "tensor"}, {"dynamic": True}), Fp8Dynamic),
    ],
)
def test_forms(config: dict[str, Any], wanted: type) -> None:
    recipes = read_recipes(config)
    assert isinstance(recipes(DOWN), wanted)
    assert isinstance(recipes(HEAD), Dense)


def test_scales_for_each_output_or_for_all() -> None:
    one = read_recipes(quantised(quant_method="fp8", activation_scheme="dynamic"))(DOWN)
    each = read_recipes(compressed({"strategy": "channel"}, {"dynamic": True}))(DOWN)
    assert isinstance(one, Fp8Dynamic) and not one.by_output
    assert isinstance(each, Fp8Dynamic) and each.by_output


def test_modelopts_own_file() -> None:
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0*"]}
    recipes = read_recipes({}, hf_quant_config={"producer": {"name": "modelopt"}, "quantization": stated})
    assert recipes.is_kv_fp8
    assert isinstance(recipes(linear("layers.1.attention.qkv", "q", "k", "v")), Fp8)
    assert isinstance(recipes(linear("layers.0.attention.qkv", "q", "k", "v")), Dense)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp",
        "mlp.down_proj",
        "down_proj",
        "*.down_proj",
        "re:.*layers.1.mlp.*",
    ],
)
def test_linears_that_stay_plain(pattern: str) -> None:
    recipes = read_recipes(quantised(quant_method="fp8", activation_scheme="static", ignored_layers=[pattern]))
    assert isinstance(recipes(DOWN), Dense)
    assert isinstance(recipes(linear("layers.10.attention.out")), Fp8)


def test_part_of_a_name_is_no_name() -> None:
    config = quantised(
        quant_method="fp8", activation_scheme="static", modules_to_not_convert=["proj", "model.layer", "1"]
    )
    assert isinstance(read_recipes(config)(DOWN), Fp8)


def test_a_fused_linear_is_quantised_whole_or_not() -> None:
    config = quantised(quant_method="fp8", modules_to_not_convert=["model.layers.1.self_attn.k_proj"])
    with pytest.raises(
        ValueError,
        match="layers.1.self_attn.k_proj unquantised but not model.layers.1.self_attn.q_proj, which is fused",
    ):
        read_recipes(config)(linear("layers.1.attention.qkv", "q", "k", "v"))


def test_plain_weights_are_quantised_on_demand() -> None:
    recipes = read_recipes({}, force_dynamic=True)
    assert isinstance(recipes(DOWN), Fp8OnLoad) and isinstance(recipes(HEAD), Dense)


def test_on_load_the_first_and_the_last_layer_stay_plain() -> None:
    recipes = read_recipes({}, force_dynamic=True, num_layers=12)
    parts = ("attention.qkv", "mlp.gate_up", "mixer.in")
    plain = {
        layer
        for layer in range(12)
        for part in parts
        if recipes(LinearNames(f"layers.{layer}.{part}")) is recipes.plain
    }
    assert plain == {0, 11}
    assert recipes.of_experts(LinearNames("layers.11.mlp.experts.down")) is recipes.plain
    assert recipes.of_experts(LinearNames("layers.1.mlp.experts.down")) is recipes.quantised
    few = read_recipes({}, force_dynamic=True, num_layers=4)
    assert few(linear("layers.0.mlp.down")) is few.quantised


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quantised(quant_method="awq"), "quant_method 'awq' is not served"),
        (quantised(quant_method="modelopt", quant_algo="NVFP4"), "quant_algo 'NVFP4' is not served"),
        (
            quantised(quant_method="compressed-tensors", config_groups={"a": 3}),
            "config_groups must hold objects, not 3",
        ),
        (
            quantised(quant_method="compressed-tensors", config_groups={"a": {"weights": "x"}}),
            "weights and input_activations must be objects",
        ),
        (quantised(quant_method="fp8", activation_scheme="odd"), "activation_scheme 'odd' is not known"),
        (quantised(quant_method="fp8", weight_block_size=[64, 128]), r"weight_block_size \[64, 128\]"),
        (compressed({"num_bits": 4, "strategy": "group"}, {}), "float4 by group"),
        (quantised(quant_method="fp8", ignored_layers="lm_head"), "must hold names"),
        (quantised(quant_method="fp8", ignored_layers=["re:(mlp"]), "quantization_config: the list of modules"),
        ({"quantization_config": "fp8"}, "must be an object"),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipes(config)


# ---- experts ---------------------------------------------------------------------------------


def product(layer: int, part: str) -> LinearNames:
    weights = WeightMap((), {**PRE_NORM_RULES, **expert_rules("model.layers.*.mlp", "layers.*.mlp")})
    slots = ("gate", "up") if part == "gate_up" else ("",)
    return stacked_names(weights, f"layers.{layer}.mlp.{part}", slots, 8)


def test_recipes_of_experts() -> None:
    mxfp4 = read_recipes({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    assert isinstance(mxfp4.of_experts(product(0, "gate_up")), Mxfp4)
    assert isinstance(mxfp4(LinearNames("layers.0.attention.qkv")), Dense)
    assert isinstance(Dense(), ExpertsRecipe) and not isinstance(Int4Weight(), ExpertsRecipe)


@pytest.mark.parametrize(
    ("ignored", "plain"),
    [
        ("model.layers.1.mlp", {"1.gate_up", "1.down"}),
        ("model.layers.1.mlp.experts", {"1.gate_up", "1.down"}),
        (r"re:.*\.1\.mlp\.experts$", {"1.gate_up", "1.down"}),
        ("*.experts.*.down_proj", {"0.down", "1.down"}),
        ("model.layers.1.mlp.experts.gate_up_proj", {"1.gate_up"}),
        (r"re:.*mlp\.gate$", set()),
        ("model.layers.1.mlp.shared_experts", set()),
    ],
)
def test_experts_that_stay_plain(ignored: str, plain: set[str]) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [ignored]}
    recipes = read_recipes({"quantization_config": config})
    parts = [(layer, part) for layer in range(2) for part in ("gate_up", "down")]
    found = {f"{layer}.{part}" for layer, part in parts if isinstance(recipes.of_experts(product(layer, part)), Dense)}
    assert found == plain


@pytest.mark.parametrize("ignored", ["0.up_proj", "0.gate_proj", "0"])
def test_experts_are_quantised_all_or_none(ignored: str) -> None:
    names = [f"model.layers.0.mlp.experts.{ignored}"]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": names}
    with pytest.raises(ValueError, match=rf"leaves {names[0]}.* unquantised but not model.layers.0.mlp.experts\."):
        read_recipes({"quantization_config": config}).of_experts(product(0, "gate_up"))
