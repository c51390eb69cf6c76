"""Architectures without a file of their own, run by the transformers library over the paged cache."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.build import Servable, build_model, known_model_types
from headrace.hub.config import read_config
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.none import Dense
from tests.kits.model import WINDOW, Case, check_all, check_branches, check_prefill, load_model, make_case, save_tiny
from tests.twin.harness import open_runtime, request, run, tokens_of

HOSTED: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": WINDOW},
    "gpt_neox": {},
    "opt": {"ffn_dim": 44, "word_embed_proj_dim": 24},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "vocab_size": 101},
}
"""Windows, layer norms and biases; a fused projection and parallel residuals; a head that asks a part of the body, and
embeddings of another width; learned positions."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=HOSTED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    assert request.param not in known_model_types(), "it has a file now: choose another"
    return make_case(tmp_path_factory.mktemp(request.param), request.param, **HOSTED[request.param])


def test_like_transformers_alone(case: Case) -> None:
    check_all(case)


def test_windows_are_found(case: Case) -> None:
    slides = case.oracle.config.model_type == "starcoder2"
    assert case.window == (WINDOW if slides else None)
    check_branches(case, {"sliding_window": 1000} if slides else {})


def test_sizes(case: Case) -> None:
    stored = sum(value.nbytes for value in case.oracle.parameters())
    assert case.report.weight_bytes == case.model.weight_map().weight_bytes == stored
    assert (case.model.vocab_size, case.model.max_position) == (101, 128)


def test_through_the_engine(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]]
    with caplog.at_level(logging.INFO, logger="headrace.engine"):
        core = open_runtime(case.source.path)
    try:
        deltas = run(core, [request(i, ids) for i, ids in enumerate(prompts)], stagger=2)
    finally:
        core.engine.close()
    lines = [record.getMessage() for record in caplog.records if "transformers library" in record.getMessage()]
    assert len(lines) <= 1
    for i, ids in enumerate(prompts):
        assert tokens_of(deltas[i]) == case.greedy(ids, 12)


def factory(**options: Any) -> LayerFactory:
    dense = Dense()
    return LayerFactory(dtype=torch.float32, **{"recipe": lambda name: dense, **options})


def test_chosen_automatically_with_one_line(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace.engine"):
        build_model(read_config(case.source), factory())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(case.oracle.config.model_type) and "transformers" in line


def test_a_native_architecture_on_request(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "llama")
    source = resolve_model(str(tmp_path))
    model, report = load_model(source, impl="transformers")
    assert type(model).__name__ == "HostedModel"
    check_prefill(Case(oracle, source, model, report))


def test_what_can_be_served() -> None:
    assert "llama" in Servable("native") and "starcoder2" not in Servable("native")
    assert "starcoder2" in Servable("auto") and "nonsense" not in Servable("auto")
    assert "llama" in Servable("transformers")


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 101}, "mamba can't be run"),
        (
            "stablelm",
            {"hidden_size": 32, "num_hidden_layers": 1},
            "stablelm can't be run .* takes no attention function",
        ),
        (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
            "falcon can't be run .* takes no attention function",
        ),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1}, "mpt can't be run"),
    ],
)
def test_what_cant_be_run_is_refused_by_name(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        build_model({"model_type": model_type, **changes}, factory(), impl="transformers")
    assert "\n" not in str(raised.value)


def test_ranks_and_quantised_weights_are_refused(case: Case) -> None:
    config = read_config(case.source)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        build_model(config, factory(parallel=ParallelContext(0, 2)))
    recipe = Fp8OnLoad()
    with pytest.raises(ValueError, match="unquantised"):
        build_model(config, factory(recipe=lambda name: recipe))


def test_sizes_that_contradict_the_tensors(tmp_path: Path) -> None:
    save_tiny(tmp_path, "starcoder2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"of a wrong shape: model\.layers\.0\.mlp"):
        load_model(resolve_model(str(tmp_path)))
