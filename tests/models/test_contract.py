"""Every file of the models room, under each model type that it serves, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from headrace import plugins
from headrace.attention.cpu import CpuAttention
from headrace.attention.port import AttentionBackend
from headrace.attention.torch import TorchAttention
from headrace.layers.experts import RoutedExperts
from headrace.layers.port import Model, RecurrentLayer
from headrace.models._transformers import ALSO_RUNS
from tests.kits.model import (
    Case,
    Row,
    Sequences,
    assert_close,
    check_branches,
    check_chunks,
    check_decode,
    check_mixed_batch,
    check_prefill,
    check_prefix_hit,
    check_snapshots,
    edge_lengths,
    load_model,
    make_case,
    prompt,
)
from tests.kits.tiny import ROWS, tiny_model


def layer_kinds(model: Model) -> set[str]:
    found: set[str] = set()
    for layer in model.layers:
        if isinstance(layer, RecurrentLayer):
            found.add("state")
        elif layer.spec is None:
            continue
        elif layer.spec.kind != "heads":
            found.add(layer.spec.kind)
        else:
            found.add("full" if layer.spec.window is None else "window")
    return found


NOT_CAUSAL = {"glm5_next", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "llama4", "minimax_m3_vl", "mistral3"}
"""Multimodal wrappers, which transformers has no causal class for; their files test them."""

MODEL_TYPES = [
    (name, model_type)
    for name in plugins.names("models")
    for model_type in plugins.load("models", name).model_types
    if model_type not in NOT_CAUSAL
]


FORMS = [name for name, row in ROWS.items() if row.of]


@pytest.fixture(scope="module", params=[*(model_type for _, model_type in MODEL_TYPES), *FORMS])
def row(request: pytest.FixtureRequest) -> str:
    """A model type, or another form of one."""
    return request.param


@pytest.fixture(scope="module")
def case(row: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    if row not in FORMS and row not in CONFIG_MAPPING and not tiny_model(row).oracle:
        pytest.skip(f"transformers has no {row}: its oracle is in a test of its own")
    return make_case(tmp_path_factory.mktemp("checkpoint"), row)


def test_prefill(case: Case) -> None:
    check_prefill(case)


def test_chunks(case: Case) -> None:
    check_chunks(case)


def test_decode(case: Case) -> None:
    check_decode(case)


@pytest.mark.parametrize("backend", [TorchAttention, CpuAttention])
def test_mixed_batch(case: Case, backend: type[AttentionBackend]) -> None:
    check_mixed_batch(case, backend=backend())


def test_prefix_hit(case: Case) -> None:
    check_prefix_hit(case)


def test_prompts_reach_the_branches(case: Case, row: str) -> None:
    branches = tiny_model(row).branches
    for what, keys in to_be_shown(case).items():
        assert branches.keys() & keys, f"the row has to show that the {what} matters"
    check_branches(case, branches)


def to_be_shown(case: Case) -> dict[str, set[str]]:
    """What a config has that prompts may not reach -> keys of it, one of which has to be among the row's branches."""
    config = case.oracle.config.to_dict()
    wanted = {
        "window": {"sliding_window", "attention_chunk_size"} if case.window is not None else set(),
        "choice of tokens": {key for key in ("index_topk", "index_topk_blocks") if config.get(key)},
        "limit of groups": {"topk_group", "topk_method"} if (config.get("n_group") or 1) > 1 else set(),
        "kind of rope": {"rope_parameters"} if is_scaled(config.get("rope_parameters")) else set(),
    }
    return {what: keys for what, keys in wanted.items() if keys}


def is_scaled(value: Any) -> bool:
    """Whether some rope is not the default one."""
    if not isinstance(value, Mapping):
        return False
    return value.get("rope_type", "default") != "default" or any(is_scaled(each) for each in value.values())


def test_snapshots(case: Case) -> None:
    check_snapshots(case)


def test_sizes_are_the_configs(case: Case, row: str) -> None:
    assert case.model.vocab_size == case.oracle.config.vocab_size
    assert len(case.model.layers) == case.oracle.config.num_hidden_layers * tiny_model(row).num_parts
    stored = load_file(case.source.path / "model.safetensors").values()
    assert case.report.weight_bytes == case.model.weight_map().weight_bytes == sum(value.nbytes for value in stored)


def test_declarations(case: Case) -> None:
    """What `headrace models` says of a file is what its models are made of."""
    declared: Any = type(case.model)
    assert layer_kinds(case.model) <= declared.layer_kinds
    modules = case.model.weight_map().modules
    assert any(isinstance(module, RoutedExperts) for module in modules) <= declared.has_experts


def test_fallback(case: Case, row: str) -> None:
    """Whether the transformers backend runs it too is known, and where it does it computes the same."""
    try:
        model, _ = load_model(case.source, impl="transformers")
    except ValueError:
        assert row in FORMS or case.oracle.config.model_type not in ALSO_RUNS
        return
    assert case.oracle.config.model_type in ALSO_RUNS
    ids = prompt(max(edge_lengths(case)))
    (logits,) = Sequences(model).step([(Row(), ids)])
    assert_close(logits, case.logits(ids), "through transformers")


def test_every_row_has_a_file() -> None:
    assert {row.of or name for name, row in ROWS.items()} <= {model_type for _, model_type in MODEL_TYPES}
