"""Every file of the models room, under each model type that it serves, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from headrace import plugins
from headrace.attention.cpu import CpuAttention
from headrace.attention.port import AttentionBackend
from headrace.attention.torch import TorchAttention
from tests.kits.model import (
    Case,
    check_chunks,
    check_decode,
    check_mixed_batch,
    check_prefill,
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
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}: its oracle is in a test of its own")
    return make_case(tmp_path_factory.mktemp(model_type), model_type)


def test_prefill(case: Case) -> None:
    check_prefill(case)


def test_chunks(case: Case) -> None:
    check_chunks(case)


def test_decode(case: Case) -> None:
    check_decode(case)


@pytest.mark.parametrize("backend", [TorchAttention, CpuAttention])
def test_mixed_batch(case: Case, backend: type[AttentionBackend]) -> None:
    check_mixed_batch(case, backend=backend())


def test_sizes_are_the_configs(case: Case) -> None:
    assert case.model.vocab_size == case.oracle.config.vocab_size
    assert len(case.model.layers) == case.oracle.config.num_hidden_layers
    num_parameters = sum(value.numel() for value in case.oracle.parameters())
    assert case.report.weight_bytes == case.model.weight_map().weight_bytes == 4 * num_parameters
