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
from headrace.hub.config import read_config
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
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


@pytest.mark.parametrize("key", ["hidden_size", "kv_lora_rank", "moe_intermediate_size"])
def test_other_sizes_that_contradict_the_tensors(folder: Path, tmp_path: Path, key: str) -> None:
    config = stated(folder)
    if not isinstance(config.get(key), int):
        pytest.skip("the config has no such size")
    said = refusal(folder, tmp_path, config | {key: 2 * config[key]})
    assert "of a wrong shape: " in said or key in said, said


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


def plain_factory() -> LayerFactory:
    dense = Dense()
    return LayerFactory(dtype=torch.float32, recipe=lambda _: dense)


def test_every_row_is_here() -> None:
    assert {name for name in ROWS if not tiny_model(name).oracle} <= set(TYPES)
