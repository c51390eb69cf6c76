"""What the tiny configs of the contract leave out of models with experts: packed weights, keys of published configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.attention.port import CacheSpec
from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, stated_quantisation
from headrace.hub.source import resolve_model
from headrace.kernels.moe.port import Stacked
from headrace.layers.decoder import Decoder
from headrace.layers.experts import Experts, ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.recipes import read_recipes
from headrace.quant.none import Dense
from tests.kits.model import (
    Case,
    check_chunks,
    check_decode,
    check_mixed_batch,
    check_prefill,
    load_case,
    make_case,
    save_tiny,
)
from tests.kits.moe import E2M1
from tests.kits.tiny import WINDOW

FILE = "model.safetensors"


def edit_config(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def specs(case: Case) -> list[CacheSpec]:
    return [layer.spec for layer in case.model.layers if layer.spec is not None]


# ---- gpt-oss in MXFP4 ------------------------------------------------------------------------


def pack(shape: tuple[int, int, int], *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks [experts, out, in / 32, 16], scales [experts, out, in / 32], the values they stand for)"""
    experts, out, features = shape
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, out, features // 32, 16), generator=draw).to(torch.uint8)
    scales = torch.randint(120, 126, (experts, out, features // 32), generator=draw).to(torch.uint8)
    low, high = (torch.tensor(E2M1)[part.long()] for part in (blocks & 15, blocks >> 4))
    values = torch.stack((low, high), -1).flatten(-2) * 2.0 ** (scales.float() - 127).unsqueeze(-1)
    return blocks, scales, values.flatten(2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint whose experts are packed, and transformers' model with the values that they stand for."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    oracle = save_tiny(folder, "gpt_oss", hidden_size=64, intermediate_size=32, num_hidden_layers=2, layer_types=None)
    tensors = load_file(folder / FILE)
    for index, layer in enumerate(oracle.model.layers):
        experts = layer.mlp.experts
        for name, parameter in (("gate_up_proj", experts.gate_up_proj), ("down_proj", experts.down_proj)):
            count, features, out = parameter.shape
            blocks, scales, values = pack((count, out, features), seed=index)
            parameter.data.copy_(values.transpose(1, 2))
            key = f"model.layers.{index}.mlp.experts.{name}"
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(tensors, folder / FILE)
    rope = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 16}  # fmt: skip
    edit_config(  # as published: other rope keys, the experts' method, no gain of the SwiGLU
        folder,
        without=("rope_parameters", "swiglu_alpha"),
        rope_scaling=rope,
        rope_theta=150_000,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    )
    source = resolve_model(str(folder))
    config = read_config(source)
    recipes = read_recipes({"quantization_config": stated_quantisation(config)})
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=ExpertsSetup(recipes.of_experts))
    model = build_model(config, factory)
    return Case(oracle, source, model, load_weights(model, source, progress=False))


def test_mxfp4_equals_the_values_it_stands_for(packed: Case) -> None:
    check_prefill(packed)
    check_decode(packed, num_tokens=8)


def test_mxfp4_stays_packed(packed: Case) -> None:
    stored = load_file(packed.source.path / FILE)
    for index, layer in enumerate(packed.model.layers):
        experts = layer.mlp  # type: ignore[attr-defined]
        assert isinstance(experts, Experts)
        prepared = experts.routed.ready()
        for side, name in ((prepared.gate_up, "gate_up_proj"), (prepared.down, "down_proj")):
            assert isinstance(side, Stacked) and side.storage == "mxfp4"
            key = f"model.layers.{index}.mlp.experts.{name}"
            bytes_stored = sum(stored[f"{key}{end}"].nbytes for end in ("_blocks", "_scales", "_bias"))
            assert side.size_bytes == bytes_stored
            assert torch.equal(side.data, stored[f"{key}_blocks"].flatten(2))


def test_dummy_mxfp4_gives_numbers(packed: Case) -> None:
    config = read_config(packed.source)
    recipes = read_recipes({"quantization_config": stated_quantisation(config)})
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=ExpertsSetup(recipes.of_experts))
    model = build_model(config, factory)
    load_weights(model, packed.source, load_format="dummy")
    data = model.layers[0].mlp.routed.ready().gate_up  # type: ignore[attr-defined]
    assert len(data.data.unique()) > 200 and data.scales.unique().tolist() == [120]


def test_every_other_layer_slides(packed: Case) -> None:
    assert [spec.window for spec in specs(packed)] == [WINDOW, None]
    assert all(layer.spec.sinks is not None for layer in packed.model.layers)  # type: ignore[union-attr]


def test_a_torn_block_is_refused(packed: Case, tmp_path: Path) -> None:
    tensors = load_file(packed.source.path / FILE)
    key = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, key: tensors[key][:, 1:].contiguous()}, tmp_path / FILE)
    (tmp_path / "config.json").write_text((packed.source.path / "config.json").read_text())
    config = read_config(packed.source)
    recipes = read_recipes({"quantization_config": stated_quantisation(config)})
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=ExpertsSetup(recipes.of_experts))
    with pytest.raises(ValueError, match=r"of a wrong shape: model.layers.1.mlp.experts.down_proj_scales"):
        load_weights(build_model(config, factory), resolve_model(str(tmp_path)), progress=False)


# ---- the others ------------------------------------------------------------------------------


def test_mixtral_without_a_window(tmp_path: Path) -> None:
    case = make_case(tmp_path, "mixtral", sliding_window=None, tie_word_embeddings=True)
    assert case.window is None
    check_prefill(case)


def test_qwen2_moe_slides_in_every_other_of_the_first_layers(tmp_path: Path) -> None:
    options = {"layer_types": None, "max_window_layers": 3, "num_hidden_layers": 4, "decoder_sparse_step": 2}
    oracle = save_tiny(tmp_path, "qwen2_moe", **{**options, "mlp_only_layers": [1], "norm_topk_prob": True})
    edit_config(tmp_path, without=("layer_types",))
    case = load_case(resolve_model(str(tmp_path)), oracle)
    assert [spec.window for spec in specs(case)] == [WINDOW, None, WINDOW, None]
    assert [isinstance(layer.mlp, Experts) for layer in case.model.layers] == [False, False, False, True]  # type: ignore[attr-defined]
    check_prefill(case)


def test_qwen3_moe_options(tmp_path: Path) -> None:
    case = make_case(
        tmp_path, "qwen3_moe", head_dim=12, attention_bias=True, use_sliding_window=False, tie_word_embeddings=True,
        num_experts_per_tok=6,
    )  # fmt: skip
    check_prefill(case)


def test_glm4_moe_without_shared_experts_groups_or_norms(tmp_path: Path) -> None:
    options = {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False}
    check_prefill(make_case(tmp_path, "glm4_moe", first_k_dense_replace=2, **options))


def test_glm4_moe_ignores_its_drafting_layers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / FILE)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / FILE)
    source = resolve_model(str(tmp_path))
    dense = Dense()
    model = build_model(read_config(source), LayerFactory(dtype=torch.float32, recipe=lambda name: dense))
    load_weights(model, source, progress=False)


def test_llama4_scales_rope_and_reaches_every_layer_kind(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    oracle = save_tiny(
        tmp_path, "llama4_text", rope_parameters=rope, no_rope_layers=[], no_rope_layer_interval=2,
        interleave_moe_layer_step=1, use_qk_norm=False, attention_bias=True,
    )  # fmt: skip
    edit_config(tmp_path, without=("layer_types", "no_rope_layers", "moe_layers"))
    case = load_case(resolve_model(str(tmp_path)), oracle)
    assert [layer.spec.is_chunked for layer in case.model.layers] == [True, False] * 2  # type: ignore[union-attr]
    for check in (check_prefill, check_chunks, check_mixed_batch):
        check(case)


def test_llama4_reads_the_text_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "llama4_text")
    tensors = {f"language_model.{name}": value for name, value in load_file(tmp_path / FILE).items()}
    save_file({**tensors, "vision_model.class_embedding": torch.zeros(2)}, tmp_path / FILE)
    text = json.loads((tmp_path / "config.json").read_text())
    text["attn_temperature_tuning"] = 4  # so in released configs
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    source = resolve_model(str(tmp_path))
    dense = Dense()
    model = build_model(read_config(source), LayerFactory(dtype=torch.float32, recipe=lambda name: dense))
    assert isinstance(model, Decoder)
    check_prefill(Case(oracle, source, model, load_weights(model, source, progress=False)))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts a token, but there are only 8"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 8}, "8 experts a token, but there are only 4"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers"),
        ("glm4_moe", {"n_group": 3, "n_routed_experts": 8}, "8 experts can't be chosen from 1 of 3 equal groups"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers must list all 2 layers"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 2}, "layer_types has the unknown 'sliding_attention'"),
        (
            "qwen2_moe",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "use_sliding_window is not set: set it",
        ),
        ("gpt_oss", {"num_local_experts": 0}, "num_local_experts must be at least 1"),
        ("gpt_oss", {"num_experts_per_tok": "4"}, "num_experts_per_tok must be an integer"),
    ],
)
def test_configs_that_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "first_k_dense_replace": 0}  # fmt: skip
    dense = Dense()
    config = HfConfig({"model_type": model_type, **sizes, **changes})
    with pytest.raises(ValueError, match=message):
        build_model(config, LayerFactory(dtype=torch.float32, recipe=lambda name: dense))
