from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import plugins
from headrace.engine import build
from headrace.engine.build import build_model, find_architecture, known_model_types
from headrace.layers.factory import LayerFactory
from headrace.quant.none import Dense


def factory() -> LayerFactory:
    dense = Dense()
    return LayerFactory(dtype=torch.float32, recipe=lambda name: dense)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma3", "gemma3"),
        ("gemma3_text", "gemma3"),
    ],
)
def test_model_types_lead_to_files(model_type: str, name: str) -> None:
    assert find_architecture(model_type) is plugins.load("models", name)
    assert model_type in known_model_types()


@pytest.mark.parametrize(("model_type", "impl"), [("mistery", "auto"), ("starcoder2", "native")])
def test_unknown_architectures_are_named_with_the_known_ones(model_type: str, impl: str) -> None:
    wanted = f"architecture '{model_type}' is not known: known are .*gemma3.*llama"
    with pytest.raises(ValueError, match=wanted) as raised:
        build_model({"model_type": model_type}, factory(), impl=impl)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("config", [{}, {"model_type": None}])
def test_configs_without_an_architecture(config: dict[str, None]) -> None:
    with pytest.raises(ValueError, match="names no architecture"):
        build_model(config, factory())


def test_incomplete_configs_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"config\.json lacks the key 'num_hidden_layers'"):
        build_model({"model_type": "llama"}, factory())


def test_only_the_named_file_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = plugins.load
    monkeypatch.setattr(build.plugins, "load", lambda room, name: (loaded.append(name), load(room, name))[1])
    find_architecture("qwen3")
    assert loaded == ["qwen3"]


def test_each_file_serves_types_of_its_own() -> None:
    types = [t for name in plugins.names("models") for t in plugins.load("models", name).model_types]
    assert len(types) == len(set(types))
    assert Path(plugins.load("models", "llama").__module__.replace(".", "/")).name == "llama"
