"""GLM-5.3-Flash inside a multimodal checkpoint and with older keys, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.build import build_model
from headrace.hub.config import read_config
from headrace.hub.read_shape import read_shape
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.quant.none import Dense
from tests.kits.interpreter import HAS_INTERPRETER
from tests.kits.model import (
    Row,
    Sequences,
    assert_close,
    check_decode,
    check_prefill,
    load_case,
    make_case,
    prompt,
    save_tiny,
)

FILE = "model.safetensors"


@pytest.mark.parametrize("is_flat", [True, False])
def test_published_keys(tmp_path: Path, is_flat: bool) -> None:
    """Flat, or as the language model beside a vision tower; KDA's keys in an object of their own."""
    torch.set_num_threads(1)
    oracle = save_tiny(tmp_path, "glm5_next_text")
    config = json.loads((tmp_path / "config.json").read_text())
    config["linear_attn_config"] = {
        "num_heads": config.pop("linear_num_heads"), "head_dim": config.pop("linear_head_dim"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        "gate_lower_bound": config.pop("linear_lower_bound"),
    }  # fmt: skip
    config["index_topk_pattern"] = "".join("S" if kind == "shared" else "F" for kind in config.pop("indexer_types"))
    config["layer_types"] = [kind.replace("indexed", "full") for kind in config["layer_types"]]
    tensors = load_file(tmp_path / FILE)
    num_layers = config["num_hidden_layers"]
    drafter = f"model.layers.{num_layers}.eh_proj.weight"
    if is_flat:
        config["model_type"] = "glm5_next"
    else:
        tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        tensors["model.visual.patch.weight"] = torch.ones(3)
        drafter = drafter.replace("model.", "model.language_model.", 1)
        config = {"model_type": "glm5_next", "text_config": config, "vision_config": {}}
    save_file({**tensors, drafter: torch.ones(2, 2)}, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    case = load_case(resolve_model(str(tmp_path)), oracle)
    check_prefill(case)
    check_decode(case, num_tokens=8)
    assert case.model.weight_map().is_kept(f"model.layers.{num_layers}.eh_proj.weight")
    shape = read_shape(read_config(case.source))
    assert [type(layer.mixer).__name__ for layer in shape.layers] == [
        "RecurrentShape", "PartedShape", "LatentShape", "RecurrentShape", "PartedShape",
    ]  # fmt: skip


def test_inside_transformers_own_multimodal_model(tmp_path: Path) -> None:
    """The wrapper's logits on text, and the names that it writes."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    torch.set_num_threads(1)
    save_tiny(tmp_path, "glm5_next_text")
    text = json.loads((tmp_path / "config.json").read_text())
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32, "patch_size": 4,
        "projection_intermediate_size": 16, "image_size": 16,
    }  # fmt: skip
    torch.manual_seed(1)
    config = Glm5NextConfig(text_config=text, vision_config=vision)
    oracle: Any = Glm5NextForConditionalGeneration._from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, value in oracle.named_parameters():
            value.copy_(torch.randn_like(value) * 0.15 + (value if "norm" in name else 0.0))
    oracle.save_pretrained(tmp_path)
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


@pytest.mark.skipif(not HAS_INTERPRETER, reason="no Triton here")
def test_layers_that_share_a_choice_on_a_gpu(tmp_path: Path) -> None:
    """Latent attention without a turned part, over what another layer's pools chose."""
    from headrace.attention.latent_triton import LatentTriton

    torch.set_num_threads(1)
    case = make_case(tmp_path, "glm5_next_text")
    ids = prompt(14)
    backend: Any = LatentTriton()
    (logits,) = Sequences(case.model, backend=backend).step([(Row(), ids)])
    assert_close(logits, case.logits(ids), "over the backend of a GPU")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    save_tiny(folder, "glm5_next_text")
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types must state linear_attention or indexed_attention"),
        ({"indexer_types": ["full", "shared", "shared", "full", "full"]}, "the first one that attends full"),
        ({"mlp_layer_types": ["moe"] * 5}, "mlp_layer_types must state dense or sparse"),
        ({"index_topk": 7}, "index_kpool 3 does not divide index_topk 7"),
        ({"index_kpool": 1}, "index_kpool must be at least 2"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail false is not served"),
        ({"qk_rope_head_dim": 6}, "qk_rope_head_dim must be 0, not 6"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ({"topk_group": 9}, "8 experts can't be chosen from 9 of 4 equal groups"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model({**config, **changes}, LayerFactory(dtype=torch.float32, recipe=lambda _: Dense()))
