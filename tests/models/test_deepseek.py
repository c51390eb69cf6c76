"""What the tiny configs of the contract leave out of models with latent attention: FP8 checkpoints, published keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, stated_quantisation
from headrace.hub.source import resolve_model
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.recipes import read_recipes
from headrace.quant._fp8 import Fp8Weight
from tests.kits.model import (
    Case,
    Row,
    Sequences,
    check_decode,
    check_prefill,
    load_case,
    load_model,
    make_case,
    prompt,
    save_tiny,
)
from tests.kits.tiny import YARN

FILE = "model.safetensors"
BLOCK = 128
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 26, "qk_rope_head_dim": 6, "v_head_dim": 32, "num_hidden_layers": 2,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "index_topk": 64,
}  # fmt: skip
"""Nothing is chosen: what rounding moves would not be a little thing then."""
PLAIN = ("norm", "embed_tokens", "lm_head", ".gate.", "weights_proj", "bias")
"""What stays as it is in published checkpoints."""


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(FP8, scales by block of 128 x 128, what they stand for)"""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.ones(rows, columns)
    stored, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[place] = stored[place].float() * scales[row, column]
    return stored, scales, meant


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v32"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """A checkpoint with all linears in FP8 blocks, and one with the values that they stand for."""
    torch.set_num_threads(1)
    folder, plain = (tmp_path_factory.mktemp(f"{request.param}_{kind}") for kind in ("fp8", "plain"))
    declared = SIZES if request.param == "deepseek_v32" else {key: SIZES[key] for key in SIZES if key != "index_topk"}
    oracle = save_tiny(folder, request.param, **declared)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, full in load_file(folder / FILE).items():
        value = full if full.dim() != 2 else full * 0.4  # small enough that rounding doesn't grow from layer to layer
        if value.dim() != 2 or any(part in name for part in PLAIN):
            stored[name] = meant[name] = value
        else:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = in_blocks(value)
    save_file(stored, folder / FILE)
    save_file(meant, plain / FILE)
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    source = resolve_model(str(folder))
    config = read_config(source)
    recipes = read_recipes({"quantization_config": stated_quantisation(config)})
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=ExpertsSetup(recipes.of_experts))
    model = build_model(config, factory)
    return Case(oracle, source, model, load_weights(model, source, progress=False)), plain


def test_fp8_blocks_come_near_the_values_they_stand_for(packed: tuple[Case, Path]) -> None:
    """Inputs are rounded to FP8 too, so only near."""
    case, plain = packed
    same, _ = load_model(resolve_model(str(plain)))
    ids = prompt(20)
    (got,), (expected,) = (Sequences(model).step([(Row(), ids)]) for model in (case.model, same))
    assert float((got - expected).norm() / expected.norm()) < 0.1
    assert not torch.equal(got, expected)


def test_unfolding_is_held_as_its_values(packed: tuple[Case, Path]) -> None:
    case, plain = packed
    same, _ = load_model(resolve_model(str(plain)))
    for ours, others in zip(case.model.layers, same.layers):
        for got, expected in zip(ours.attention.unfold.ready(), others.attention.unfold.ready()):  # type: ignore[attr-defined]
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_everything_else_stays_packed(packed: tuple[Case, Path]) -> None:
    attention = packed[0].model.layers[1].attention  # type: ignore[attr-defined]
    for linear in (attention.down, attention.q, attention.out):
        assert isinstance(linear._prepared, Fp8Weight), linear.name
    sides = packed[0].model.layers[1].mlp.routed.ready()  # type: ignore[attr-defined]
    assert sides.gate_up.data.dtype == sides.down.data.dtype == torch.float8_e4m3fn


def test_published_keys(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top, `type` for the rope's type, no rope_interleave."""
    rope = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.8}
    case = make_case(tmp_path, "deepseek_v3", rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config.pop("rope_interleave", None)
    del rope["rope_theta"], rope["rope_type"]
    published = {
        **config,
        "rope_theta": 10_000,
        "rope_scaling": {**rope, "type": "yarn"},
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    source = resolve_model(str(tmp_path))
    model, report = load_model(source)
    again = Case(case.oracle, source, model, report)
    check_prefill(again)
    check_decode(again, num_tokens=6)


def test_the_indexers_rope_is_as_stated(tmp_path: Path) -> None:
    """`indexer_rope_interleave`, which transformers doesn't read: with it off GLM-5's indexer is DeepSeek-V3.2's."""
    torch.set_num_threads(1)
    oracle = save_tiny(tmp_path, "deepseek_v32")
    config = json.loads((tmp_path / "config.json").read_text())
    stated = {**config, "model_type": "glm_moe_dsa", "indexer_rope_interleave": False}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))
    (tmp_path / "config.json").write_text(json.dumps({**stated, "indexer_rope_interleave": True}))
    with pytest.raises(AssertionError, match="logits differ"):
        check_prefill(load_case(resolve_model(str(tmp_path)), oracle))
