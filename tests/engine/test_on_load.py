"""`force_dynamic_quantization`: plain weights become FP8 while they are loaded."""

from __future__ import annotations

from pathlib import Path

from headrace.config.llm_args import LlmArgs
from headrace.engine.rank import Rank
from headrace.hub.source import resolve_model
from headrace.layers.attention import Attention
from headrace.layers.decoder import PreNormLayer
from headrace.layers.parallel import ParallelContext
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.none import Dense
from tests.kits.model import save_tiny


def test_all_layers_but_the_first_and_the_last(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=8)
    args = LlmArgs.model_validate({
        "model": str(tmp_path), "dtype": "bfloat16", "max_num_tokens": 16, "max_batch_size": 4,
        "force_dynamic_quantization": True, "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64},
    })  # fmt: skip
    rank = Rank(args, resolve_model(str(tmp_path)), ParallelContext(), num_valid_ids=None)
    recipes = []
    for layer in rank.model.layers:
        assert isinstance(layer, PreNormLayer) and isinstance(layer.attention, Attention)
        recipes.append(type(layer.attention.qkv.recipe))
    assert recipes == [Dense, *[Fp8OnLoad] * 6, Dense]
    rank.close()
