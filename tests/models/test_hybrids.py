"""What the contract's tiny configs leave out of recurrent models: keys and names of published checkpoints, parts that a
config may leave away, configs that don't add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.build import build_model
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import RecurrentLayer
from headrace.quant.none import Dense
from tests.kits.model import Case, check_chunks, check_prefill, check_prefix_hit, load_case, make_case, save_tiny
from tests.kits.tiny import TINY, tiny_model

FILE = "model.safetensors"
LINEAR, FULL = "linear_attention", "full_attention"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rewrite(folder: Path, *, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def stored_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def reloaded(folder: Path, oracle: Any) -> Case:
    return load_case(resolve_model(str(folder)), oracle)


# ---- Kimi Linear -----------------------------------------------------------------------------


def test_kimi_linear_as_published(tmp_path: Path) -> None:
    """Keys in `linear_attn_config`, dense layers by the count of them and under their own name."""
    oracle = save_tiny(tmp_path, "kimi_linear")
    config = stored_config(tmp_path)
    for key in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        config.pop(key)
    config["linear_attn_config"] = {
        "num_heads": 4, "head_dim": 6, "short_conv_kernel_size": 3, "full_attn_layers": [2], "kda_layers": [1, 3],
    }  # fmt: skip
    config |= {"first_k_dense_replace": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    tensors = load_file(tmp_path / FILE)
    dense = "model.layers.0.block_sparse_moe."
    tensors = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in tensors.items()}
    rewrite(tmp_path, config=config, tensors=tensors)
    case = reloaded(tmp_path, oracle)
    assert [isinstance(layer, RecurrentLayer) for layer in case.model.layers] == [True, False, True]
    check_prefill(case)


def test_kimi_linear_with_one_convolution(tmp_path: Path) -> None:
    """As transformers holds it: the three convolutions joined."""
    oracle = save_tiny(tmp_path, "kimi_linear")
    tensors = load_file(tmp_path / FILE)
    for layer in (0, 2):
        block = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{block}.{slot}_conv1d.weight") for slot in ("q", "k", "v")]
        tensors[f"{block}.conv1d.weight"] = torch.cat(parts)
    rewrite(tmp_path, config=stored_config(tmp_path), tensors=tensors)
    check_prefill(reloaded(tmp_path, oracle))


def test_kimi_linear_with_low_rank_queries(tmp_path: Path) -> None:
    check_chunks(make_case(tmp_path, "kimi_linear", q_lora_rank=20))


# ---- Qwen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_multimodal_checkpoint(tmp_path: Path, model_type: str) -> None:
    """Its config is nested, its names have a prefix, and what it has beside text is left out."""
    oracle = save_tiny(tmp_path, f"{model_type}_text")
    text, tensors = stored_config(tmp_path), load_file(tmp_path / FILE)
    prefixed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    extra = {"model.visual.blocks.0.norm1.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2, 2)}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = {"model_type": model_type, "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    rewrite(tmp_path, config=config, tensors={**prefixed, **extra})
    check_prefill(reloaded(tmp_path, oracle))


def test_every_fourth_layer_attends(tmp_path: Path) -> None:
    """Where a config states the interval alone."""
    kinds = [LINEAR] * 3 + [FULL]
    oracle = save_tiny(tmp_path, "qwen3_next", layer_types=kinds)
    config = stored_config(tmp_path)
    config.pop("layer_types")
    rewrite(tmp_path, config={**config, "full_attention_interval": 4})
    case = reloaded(tmp_path, oracle)
    assert [isinstance(layer, RecurrentLayer) for layer in case.model.layers] == [True] * 3 + [False]
    check_prefill(case)


# ---- Mamba -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"use_conv_bias": False, "use_bias": True, "tie_word_embeddings": True},
        {"n_groups": 1, "conv_kernel": 2},
        {"time_step_limit": [0.1, 0.7]},
    ],
)
def test_mamba2(tmp_path: Path, changes: dict[str, Any]) -> None:
    case = make_case(tmp_path, "mamba2", **changes)
    check_prefill(case)
    if "time_step_limit" not in changes:  # transformers cuts step sizes in chunks only, not in single steps
        check_chunks(case)


def test_nemotron_h_by_pattern(tmp_path: Path) -> None:
    """An older config: letters for layers, experts that see the whole hidden state."""
    oracle = save_tiny(tmp_path, "nemotron_h", moe_latent_size=None)
    config = stored_config(tmp_path)
    config.pop("layers_block_type")
    rewrite(tmp_path, config={**config, "hybrid_override_pattern": "ME*-M"})
    case = reloaded(tmp_path, oracle)
    kinds = [
        "state" if isinstance(layer, RecurrentLayer) else "none" if layer.spec is None else layer.spec.kind
        for layer in case.model.layers
    ]
    assert kinds == ["state", "none", "heads", "none", "state"]
    check_prefill(case)


def test_nemotron_h_that_begins_and_ends_with_an_mlp(tmp_path: Path) -> None:
    kinds = ["mlp", "moe", LINEAR, "mlp", FULL, "mlp"]
    case = make_case(tmp_path, "nemotron_h", layers_block_type=kinds, use_bias=True)
    check_prefill(case)
    check_prefix_hit(case)


def test_granite_without_experts(tmp_path: Path) -> None:
    case = make_case(
        tmp_path, "granitemoehybrid", num_local_experts=0, mamba_n_groups=2, mamba_proj_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    check_prefill(case)


# ---- configs that don't add up ---------------------------------------------------------------


def build(model_type: str, *, size: int = 1, **changes: Any) -> Any:
    config = {**TINY, "sliding_window": None, **tiny_model(model_type).changes, **changes, "model_type": model_type}
    dense = Dense()
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: dense, parallel=ParallelContext(size - 1, size))
    return build_model(config, factory)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("kimi_linear", {"layer_types": [LINEAR] * 2}, "layer_types must state .* for each of 3 layers"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}},
            "must name each of the layers 1 to 3 once",
        ),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ("kimi_linear", {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype 'int8' is not float32"),
        ("mamba2", {"n_groups": 3}, "3 groups.* do not divide 8 Mamba heads"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not served: only 'silu' is"),
        ("mamba2", {"time_step_limit": [0.5]}, "time_step_limit must be two numbers"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit must be from 0 on and ascending"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            r"unknown kinds of layers \['X'\]",
        ),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type or hybrid_override_pattern must state"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "experts with mlp_hidden_act 'silu'"),
        ("granitemoehybrid", {"mamba_d_head": 5}, "8 Mamba heads of 5 features are not"),
        ("granitemoehybrid", {"layer_types": ["mamba", "x", "mamba"]}, "layer_types must state mamba or attention"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide"),
    ],
)
def test_configs_are_refused_by_name(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_type, **changes)


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "mamba2"])
def test_more_ranks_than_groups(model_type: str) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 4"):
        build(model_type, size=4)
