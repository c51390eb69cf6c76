"""Checkpoints in FP8 whose list of plain modules names linears of other layers than plain attention: they load."""

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
from headrace.kernels.quantise import FP8
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.recipes import Modules, read_recipes
from tests.kits.model import Sequences, load_model, prompt, save_tiny
from tests.kits.plain_linears import Asked, check_plain_linears
from tests.kits.sequences import Row
from tests.kits.tiny_kimi_k3 import save_kimi_k3

FILE = "model.safetensors"
EXPERTS = r"re:.*\.experts(\..*)?$"
FP8_GROUP = {
    "targets": ["Linear"],
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "input_activations": {"type": "float", "num_bits": 8, "dynamic": True},
}


def quantise(folder: Path, ignored: list[str], *, of: str, prefix: str) -> int:
    """Store every linear but those that are ignored in FP8; the number of them.

    Args:
        of: the model type of a multimodal checkpoint around it, where there is one.
        prefix: of its language model's names, in place of `model.`.
    """
    tensors = load_file(folder / FILE)
    holders = Asked.by(read_config(resolve_model(str(folder)))).holders(tensors)
    stored: dict[str, Tensor] = {}
    for full, value in tensors.items():
        name, module = full, full.removesuffix(".weight")
        if prefix and full.startswith("model."):
            name = prefix + full.removeprefix("model.")
        stored[name] = value
        if module in holders and not Modules.of(ignored).holds(name.removesuffix(".weight")):
            scale = value.abs().amax(1, keepdim=True) / torch.finfo(FP8).max
            stored |= {name: (value / scale).to(FP8), f"{name}_scale": scale}
    save_file(stored, folder / FILE)
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP}, "ignore": ignored}
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = {"model_type": of, "text_config": config} if of else config
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return len(stored) - len(tensors)


@pytest.mark.parametrize(
    ("model_type", "ignored", "of", "prefix"),
    [
        ("qwen3_next", [r"re:.*linear_attn.*", EXPERTS], "", ""),
        ("qwen3_next", ["model.layers.0.linear_attn.out_proj", EXPERTS], "", ""),
        ("qwen3_5_text", [r"re:.*\.in_proj_[abz]$", "re:.*in_proj_qkv$"], "qwen3_5", "model.language_model."),
        ("deepseek_v3", [r"re:.*kv_b_proj$", EXPERTS], "", ""),
        ("deepseek_v3", [r"re:.*(kv_a_proj_with_mqa|q_a_proj)$", "*.shared_experts", EXPERTS], "", ""),
        ("nemotron_h", ["*.mixer.in_proj", EXPERTS], "", ""),
        ("kimi_linear", [r"re:.*self_attn\.b_proj$", EXPERTS], "", ""),
        ("phi3", ["model.layers.1.self_attn.qkv_proj", "*.0.mlp.gate_up_proj"], "", ""),
        ("mistral", ["language_model.model.layers.0.mlp.down_proj"], "mistral3", "language_model.model."),
        ("mistral", ["model.layers.0.mlp"], "mistral3", "model.language_model."),
    ],
)
def test_they_load(tmp_path: Path, model_type: str, ignored: list[str], of: str, prefix: str) -> None:
    torch.set_num_threads(1)
    save_tiny(tmp_path, model_type)
    exact, _ = load_model(resolve_model(str(tmp_path)))
    mixed = prefix == "model.language_model." and of == "mistral3"  # the list is in the names of the model alone
    count = quantise(tmp_path, [prefix + each.removeprefix("model.") if mixed else each for each in ignored], of=of,
                     prefix=prefix)  # fmt: skip
    assert count > 3
    source = resolve_model(str(tmp_path))
    config = read_config(source)
    stated = {**stated_quantisation(config), "ignore": ignored}
    recipes = read_recipes({"quantization_config": stated})
    experts = ExpertsSetup(recipes.of_experts)
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=experts, plain=recipes.plain)
    model = build_model(config, factory)
    load_weights(model, source, progress=False)
    (got,), (expected,) = (Sequences(each).step([(Row(), prompt(11))]) for each in (model, exact))
    likeness = float(torch.corrcoef(torch.stack((got.flatten(), expected.flatten())))[0, 1])
    assert 0.8 < likeness < 1


def test_lists_of_kimi_k3(tmp_path: Path) -> None:
    """Which transformers doesn't know, so that the contract isn't run over it."""
    save_kimi_k3(tmp_path)
    check_plain_linears(read_config(resolve_model(str(tmp_path))), load_file(tmp_path / FILE))
