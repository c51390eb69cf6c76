"""`force_dynamic_quantization`: plain weights become FP8 at load, and a plan counts what they then take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import on_load
from headrace.config.llm_args import LlmArgs
from headrace.engine.build import build_model, known_model_types
from headrace.engine.rank import Rank
from headrace.hub.config import read_config
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import num_layers, read_shape
from headrace.hub.source import resolve_model
from headrace.layers.attention import Attention
from headrace.layers.decoder import PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.recipes import read_recipes
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.none import Dense
from headrace.runtime.forecast import Spread, Stage, forecast
from headrace.runtime.gpus import Device
from tests.engine.test_plan_covers import FORMS, config_of
from tests.kits.model import save_tiny

LAYERS = 8


def planned(config: dict[str, Any], args: LlmArgs) -> Stage:
    ranks = Ranks(args.tensor_parallel_size)
    (stage,) = forecast(args, read_shape(config), Spread(Device("cpu", 1 << 34, 0), ranks)).stages
    return stage


@pytest.fixture
def args(tmp_path: Path) -> LlmArgs:
    save_tiny(tmp_path, "llama", num_hidden_layers=LAYERS)
    return LlmArgs.model_validate({
        "model": str(tmp_path), "dtype": "bfloat16", "max_num_tokens": 16, "max_batch_size": 4,
        "force_dynamic_quantization": True, "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64},
    })  # fmt: skip


def test_all_layers_but_the_first_and_the_last(args: LlmArgs) -> None:
    source = resolve_model(args.model)
    rank = Rank(args, source, ParallelContext(), num_valid_ids=None)
    recipes, held_bytes = [], 0
    for layer in rank.model.layers:
        assert isinstance(layer, PreNormLayer) and isinstance(layer.attention, Attention)
        recipes.append(type(layer.attention.qkv.recipe))
        qkv = layer.attention.qkv._prepared
        assert qkv is not None
        held_bytes += qkv.size_bytes
    assert recipes == [Dense, *[Fp8OnLoad] * (LAYERS - 2), Dense]
    parameters = [layer.attention.qkv.parameters for layer in rank.model.layers]  # type: ignore[attr-defined]
    assert held_bytes == sum(each.held_bytes for (each,) in parameters), "said before loading"
    stage = planned(read_config(source), args)
    assert rank.facts.weight_bytes == pytest.approx(stage.facts.weight_bytes, rel=0.02), "inputs aren't all as wide"
    rank.close()


def test_room_is_asked_for_what_stays(args: LlmArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits in FP8 alone is loaded."""
    source = resolve_model(args.model)
    plain = LlmArgs.model_validate(args.model_dump(exclude_unset=True) | {"force_dynamic_quantization": False})
    in_fp8, in_bfloat16 = (planned(read_config(source), each).facts.weight_bytes for each in (args, plain))
    assert in_fp8 < 0.8 * in_bfloat16
    monkeypatch.setattr("headrace.engine.memory.free_memory_bytes", lambda: int(in_fp8 * 1.05))
    Rank(args, source, ParallelContext(), num_valid_ids=None).close()
    with pytest.raises(MemoryError, match="the weights take"):
        Rank(plain, source, ParallelContext(), num_valid_ids=None)


@pytest.mark.parametrize("min_layers", [1, 100], ids=["but the ends", "all layers"])
@pytest.mark.parametrize("name", [*sorted(known_model_types()), *FORMS])
def test_a_plan_has_the_same_weights_in_fp8(name: str, min_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales aside, which a plan takes to be as many as with inputs of the hidden size."""
    monkeypatch.setattr(on_load, "SCALE_BITS", 0)
    monkeypatch.setattr(on_load, "MIN_LAYERS", min_layers)
    config = config_of(name)
    recipes = read_recipes({}, force_dynamic=True, num_layers=num_layers(config))
    for size in (1, 2):
        factory = LayerFactory(dtype=torch.bfloat16, recipe=recipes, parallel=ParallelContext(0, size))
        held_bytes = build_model(config, factory).weight_map().held_bytes
        args = LlmArgs(model="m", dtype="bfloat16", tensor_parallel_size=size, force_dynamic_quantization=True)
        assert planned(config, args).facts.weight_bytes == held_bytes
