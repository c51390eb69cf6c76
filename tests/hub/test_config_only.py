from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.hub.config import stated_quantisation
from headrace.hub.config_only import find_config
from headrace.hub.errors import ModelError

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 2.0, "rope_type": "linear"}}


def test_a_folder_or_a_file_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}))
    assert find_config(str(tmp_path)) == CONFIG
    assert find_config(str(tmp_path / "other.json"))["hidden_size"] == 32
    changed = find_config(str(tmp_path), model_kwargs={"rope_scaling": {"factor": 4.0}})
    assert changed["rope_scaling"] == {"factor": 4.0, "rope_type": "linear"}


def test_modelopt_says_apart_how_weights_are_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    quantised = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantised))
    assert find_config(str(tmp_path))["quantization_config"]["quant_algo"] == "NVFP4"


@pytest.mark.parametrize("name", ["/no/such/model", "no/such-model"])
def test_what_is_not_there_is_one_line(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_config(name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        find_config(str(tmp_path / "config.json"))


def test_quantisation_is_stated_inside_or_around_the_language_model() -> None:
    stated = {"quant_method": "fp8"}
    assert stated_quantisation({"quantization_config": stated}) == stated
    assert stated_quantisation({"text_config": {"hidden_size": 8}, "quantization_config": stated}) == stated
    assert stated_quantisation({"text_config": {"quantization_config": stated}}) == stated
    assert stated_quantisation({"text_config": {}}) is None
