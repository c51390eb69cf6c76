"""Weights of multi-token prediction: found beside those of the layers, named in the log, mapped and not copied."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.config.llm_args import LlmArgs
from headrace.engine.kept import keep_or_leave
from headrace.engine.rank import Rank
from headrace.hub.source import resolve_model
from headrace.layers.parallel import ParallelContext
from headrace.runtime.settle import settle
from tests.kits.model import load_model, save_tiny

FILE = "model.safetensors"
DEEPSEEK = {"model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.self_attn.o_proj.weight": (32, 48)}
QWEN = {"mtp.fc.weight": (32, 64), "mtp.layers.0.input_layernorm.weight": (32,)}
NEMOTRON = {"mtp.layers.0.eh_proj.weight": (32, 64), "mtp.layers.1.norm.weight": (32,)}
FIFTH = {name.replace(".3.", ".5."): shape for name, shape in DEEPSEEK.items()}
CASES = [
    *((name, DEEPSEEK) for name in ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa")),
    *((name, QWEN) for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "deepseek_v4", "minimax_m3_vl_text")),
    ("glm5_next_text", FIFTH),
    ("nemotron_h", NEMOTRON),
]


def write(folder: Path, model_type: str, more: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    save_tiny(folder, model_type)
    draft = {name: torch.randn(shape).bfloat16() for name, shape in more.items()}
    save_file({**load_file(folder / FILE), **draft}, folder / FILE)
    return draft


@pytest.mark.parametrize(("model_type", "more"), CASES, ids=[case[0] for case in CASES])
def test_they_are_mapped_as_they_are_stored(
    model_type: str, more: dict[str, tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = write(tmp_path, model_type, more)
    source = resolve_model(str(tmp_path))
    model, report = load_model(source)
    assert report.weight_bytes == model.weight_map().weight_bytes, "layers hold none of them"
    with caplog.at_level(logging.INFO, "headrace.engine"):
        kept = keep_or_leave(source, model.weight_map(), load_format="auto", is_wanted=True)
    assert kept.keys() == draft.keys() and kept.size_bytes == sum(value.nbytes for value in draft.values())
    for name, value in draft.items():
        assert kept[name].dtype == torch.bfloat16 and torch.equal(kept[name], value)
    assert "2 tensors of multi-token prediction" in caplog.text and "kept for speculation" in caplog.text
    assert any(f"({name}" in caplog.text for name in ("model.layers.3)", "model.layers.5)", "mtp"))


def test_without_speculation_they_stay_where_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "deepseek_v3", DEEPSEEK)
    args = LlmArgs.model_validate({
        "model": str(tmp_path), "dtype": "float32", "max_num_tokens": 16, "max_batch_size": 4,
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64},
    })  # fmt: skip
    with caplog.at_level(logging.INFO, "headrace.engine"):
        engine = Rank(args, resolve_model(str(tmp_path)), ParallelContext(), num_valid_ids=None)
    assert not engine.kept and engine.facts.kept_bytes == 0
    assert "stay in the checkpoint: speculation is off" in caplog.text
    assert all(row.name != "weights for speculation" for row in settle(args, engine.facts).memory.rows)
    engine.close()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_5_text"])
def test_drawn_weights_need_no_file(model_type: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, model_type)
    (tmp_path / FILE).unlink()
    args = LlmArgs.model_validate({
        "model": str(tmp_path), "dtype": "float32", "max_num_tokens": 16, "max_batch_size": 4, "load_format": "dummy",
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64},
        "speculative_config": {"decoding_type": "MTP"},
    })  # fmt: skip
    engine = Rank(args, resolve_model(str(tmp_path)), ParallelContext(), num_valid_ids=None)
    assert not engine.kept
    engine.close()


def test_with_speculation_they_are_counted(tmp_path: Path) -> None:
    draft = write(tmp_path, "deepseek_v3", DEEPSEEK)
    args = LlmArgs.model_validate({
        "model": str(tmp_path), "dtype": "float32", "max_num_tokens": 16, "max_batch_size": 4,
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64},
        "speculative_config": {"decoding_type": "MTP"},
    })  # fmt: skip
    engine = Rank(args, resolve_model(str(tmp_path)), ParallelContext(), num_valid_ids=None)
    (row,) = [row for row in settle(args, engine.facts).memory.rows if row.name == "weights for speculation"]
    assert row.size_bytes == sum(value.nbytes for value in draft.values()) and row.tier == "host"
    engine.close()


def test_other_tensors_behind_the_last_layer_are_refused(tmp_path: Path) -> None:
    """One layer of prediction is declared, so a second one doesn't fit the config."""
    write(tmp_path, "deepseek_v3", {"model.layers.4.eh_proj.weight": (32, 64)})
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.4\.eh_proj"):
        load_model(resolve_model(str(tmp_path)))
