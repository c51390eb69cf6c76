"""The example of docs/adding-a-model.md, taken from the page and run: one file of less than 60 lines is all it takes.

transformers has no AcmeLlama: its oracle is a Llama, of which the checkpoint is the unfolded form.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace import plugins
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.norm import CentredScale
from tests.kits.model import Case, check_all, load_case, prompt, save_tiny
from tests.twin.harness import open_runtime, request, run, tokens_of

SCALE = 0.375


PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


@pytest.fixture(autouse=True)
def acme_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code as a file in the models room."""
    torch.set_num_threads(1)
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) < 60
    path = tmp_path_factory.mktemp("models") / "acmellama.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("headrace.models.acmellama", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own_names = plugins._own_names
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        plugins, "_own_names", lambda room: own_names(room) | ({"acmellama"} if room == "models" else set())
    )


def make_acme(folder: Path, **changes: Any) -> Case:
    """norm' = norm - 1 in the layers, down' = down / scale: what AcmeLlama computes of these is the Llama."""
    oracle = save_tiny(folder, "llama", **changes)
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("layernorm.weight"):
            weights[name] = value - 1
        elif "mlp.down_proj" in name:
            weights[name] = value / SCALE
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "acmellama", "architectures": ["AcmeLlamaForCausalLM"], "mlp_scale": SCALE}
    (folder / "config.json").write_text(json.dumps(config))
    return load_case(resolve_model(str(folder)), oracle)


@pytest.mark.parametrize("is_tied", [False, True])
def test_like_the_folded_llama(tmp_path: Path, is_tied: bool) -> None:
    check_all(make_acme(tmp_path, tie_word_embeddings=is_tied))


def test_greedy_through_the_engine(tmp_path: Path) -> None:
    case = make_acme(tmp_path)
    prompts = [prompt(length, seed=3) for length in (1, 4, 7, 18)]
    core = open_runtime(tmp_path)
    try:
        deltas = run(core, [request(i, ids) for i, ids in enumerate(prompts)], stagger=2)
    finally:
        core.engine.close()
    for i, ids in enumerate(prompts):
        assert tokens_of(deltas[i]) == case.greedy(ids, 12)


def test_the_scale_is_asked_for(tmp_path: Path) -> None:
    make_acme(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["mlp_scale"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mlp_scale"):
        load_case(resolve_model(str(tmp_path)), None)


class MeanScale(CentredScale):
    """A norm of one's own: divides by the mean of the absolute values."""

    def __call__(self, x: Tensor) -> Tensor:
        weight, _ = self.loaded
        return (weight * x.float() / (x.float().abs().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MeanNorm(nn.Module):
    """The same in transformers' Llama."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_a_norm_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = save_tiny(tmp_path, "llama")
    for layer in oracle.model.layers:
        layer.input_layernorm = MeanNorm(layer.input_layernorm)
        layer.post_attention_layernorm = MeanNorm(layer.post_attention_layernorm)
    oracle.model.norm = MeanNorm(oracle.model.norm)
    monkeypatch.setattr(LayerFactory, "norm", partialmethod(LayerFactory.layer_norm, kind=MeanScale))
    check_all(load_case(resolve_model(str(tmp_path)), oracle))
