from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.hub.quantisation import quantisation_name
from headrace.hub.source import ModelSource


@pytest.mark.parametrize(
    ("config", "beside", "name"),
    [
        ({}, None, ""),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, None, "awq"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, None, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, None, "NVFP4"),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "FP8"),
        ({}, {"quantization": {"quant_algo": None}}, ""),
    ],
)
def test_names(tmp_path: Path, config: dict[str, Any], beside: dict[str, Any] | None, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert quantisation_name(ModelSource(kind="hf", path=tmp_path, name="m")) == name


def test_other_sources(tmp_path: Path) -> None:
    assert quantisation_name(ModelSource(kind="hf", path=tmp_path, name="m")) == ""
    assert quantisation_name(ModelSource(kind="gguf", path=tmp_path / "m.gguf", name="m")) == "gguf"
