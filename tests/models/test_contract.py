"""Every file of the models room, under each model type that it serves, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from headrace import plugins
from headrace.attention.cpu import CpuAttention
from headrace.attention.port import AttentionBackend
from headrace.attention.torch import TorchAttention
from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config
from headrace.hub.source import resolve_model
from headrace.layers.experts import ExpertsSetup, RoutedExperts
from headrace.layers.factory import LayerFactory
from headrace.layers.port import Model, RecurrentLayer
from headrace.layers.recipes import read_recipes
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
    is_older,
    load_case,
    load_model,
    make_case,
    prompt,
    save_tiny,
    tiny_config,
    wrap_tiny,
)
from tests.kits.plain_linears import check_plain_linears
from tests.kits.tiny import ROWS, WRAPPERS, tiny_model


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


MODEL_TYPES = [
    (name, model_type)
    for name in plugins.names("models")
    for model_type in plugins.load("models", name).model_types
    if model_type not in WRAPPERS
]


FORMS = [name for name, row in ROWS.items() if row.of]


def skip_unless_known(row: str) -> None:
    """This release of transformers may lack the type, or the one by which it computes the same."""
    known = tiny_model(row).oracle or tiny_model(row).of or row
    if known not in CONFIG_MAPPING:
        pytest.skip(
            f"transformers {transformers.__version__} has no {known}: a test of its own holds {row}, if any can"
        )
    if is_older(transformers.__version__):
        try:
            tiny_config(row)
        except Exception as error:
            pytest.skip(f"transformers {transformers.__version__} does not take {row}'s config: {error}")


@pytest.fixture(scope="module", params=[*(model_type for _, model_type in MODEL_TYPES), *FORMS])
def row(request: pytest.FixtureRequest) -> str:
    """A model type, or another form of one."""
    return request.param


@pytest.fixture(scope="module")
def case(row: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    skip_unless_known(row)
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


def test_fp8_weights(case: Case, row: str) -> None:
    """Rounded to FP8 while loading, which says of a checkpoint in FP8 that its layers can be stored so."""
    recipes = read_recipes({}, hf_quant_config=None, force_dynamic=True)
    experts = ExpertsSetup(recipes.of_experts)
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, experts=experts, plain=recipes.plain)
    model = build_model(read_config(case.source), factory)
    load_weights(model, case.source, progress=False)
    ids = prompt(21)
    got, exact = (Sequences(each).step([(Row(), ids)])[0] for each in (model, case.model))
    assert not torch.equal(got, exact)
    likeness = float(torch.corrcoef(torch.stack((got.flatten(), exact.flatten())))[0, 1])
    assert likeness > ROUGH.get(row, 0.75), f"logits are like the exact ones by {likeness:.2f}"


def test_linears_that_lists_leave_plain(case: Case) -> None:
    check_plain_linears(read_config(case.source), load_file(case.source.path / "model.safetensors"))


ROUGH = {"gemma4_text small": 0.4, "gemma4_text experts": 0.2}
"""Their layers' inputs are normed to larger scores (the scale is 1), which spreads what is rounded."""


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_text_of_a_multimodal_checkpoint(wrapper: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    skip_unless_known(WRAPPERS[wrapper])
    oracle = save_tiny(tmp_path, WRAPPERS[wrapper])
    wrap_tiny(tmp_path, wrapper)
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


def test_every_row_has_a_file() -> None:
    assert {row.of or name for name, row in ROWS.items()} <= {model_type for _, model_type in MODEL_TYPES}
