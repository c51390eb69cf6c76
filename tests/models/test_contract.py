"""Every file of the models room, under each model type that it serves, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import plugins
from headrace.engine.weights import load_weights
from tests.kits.model import (
    Case,
    check_chunks,
    check_decode,
    check_mixed_batch,
    check_prefill,
    load_model,
    make_case,
)

NOT_CAUSAL = {"gemma3"}
"""Multimodal wrappers, which transformers has no causal class for; their files test them."""

MODEL_TYPES = [
    (name, model_type)
    for name in plugins.names("models")
    for model_type in plugins.load("models", name).model_types
    if model_type not in NOT_CAUSAL
]


@pytest.fixture(scope="module", params=MODEL_TYPES, ids=lambda pair: pair[1])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    _, model_type = request.param
    return make_case(tmp_path_factory.mktemp(model_type), model_type)


def test_prefill(case: Case) -> None:
    check_prefill(case)


def test_chunks(case: Case) -> None:
    check_chunks(case)


def test_decode(case: Case) -> None:
    check_decode(case)


def test_mixed_batch(case: Case) -> None:
    check_mixed_batch(case)


def test_every_file_lists_its_own_name_or_more() -> None:
    for name in plugins.names("models"):
        assert plugins.load("models", name).model_types, name


def test_sizes_are_the_configs(case: Case) -> None:
    assert case.model.vocab_size == case.oracle.config.vocab_size
    assert len(case.model.layers) == case.oracle.config.num_hidden_layers
    num_parameters = sum(value.numel() for value in case.oracle.parameters())
    assert case.report.weight_bytes == case.model.weight_map().weight_bytes == 4 * num_parameters


def test_dummy_weights_run(case: Case, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((case.source.path / "config.json").read_text())
    source = type(case.source)(kind="hf", path=tmp_path, name=str(tmp_path))
    with pytest.raises(ValueError, match="safetensors"):
        load_model(source)
    import headrace.engine.build as build
    from headrace.hub.config import read_config
    from headrace.layers.factory import LayerFactory
    from headrace.quant.none import Dense

    dense = Dense()
    model = build.build_model(read_config(source), LayerFactory(dtype=torch.float32, recipe=lambda name: dense))
    load_weights(model, source, load_format="dummy")
