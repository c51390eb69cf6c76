from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.hub.config import eos_token_ids, read_config, read_generation_config, text_config
from headrace.hub.errors import ModelError
from headrace.hub.pretrained import load_auto_tokenizer
from headrace.hub.source import ModelSource, resolve_model
from tests.hub.tiny_gguf import VOCAB, write_tiny_model


@dataclass
class FakeTokenizer:
    eos_ids: frozenset[int] = field(default_factory=frozenset)


def folder(tmp_path: Path, config: Any, generation: Any = None) -> ModelSource:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return resolve_model(str(tmp_path))


def gguf(tmp_path: Path, extra: dict[str, Any]) -> ModelSource:
    write_tiny_model(tmp_path / "m.gguf", "llama", extra=extra)
    return resolve_model(str(tmp_path / "m.gguf"))


def test_config_of_a_folder_with_overrides(tmp_path: Path) -> None:
    source = folder(tmp_path, {"model_type": "llama", "rope_scaling": {"factor": 2.0, "rope_type": "linear"}, "a": 1})
    config = read_config(source, model_kwargs={"a": 2, "rope_scaling": {"factor": 4.0}, "b": {"c": 3}})
    assert config == {
        "model_type": "llama",
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
        "a": 2,
        "b": {"c": 3},
    }


def test_config_of_a_gguf_file_with_overrides(tmp_path: Path) -> None:
    config = read_config(gguf(tmp_path, {}), model_kwargs={"max_position_embeddings": 99})
    assert config["model_type"] == "llama" and config["max_position_embeddings"] == 99


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[1]", "no JSON object"), ("{}", "without model_type"), ("", "not valid JSON")],
)
def test_broken_configs_are_one_line(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        read_config(folder(tmp_path, content))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_type_gets_the_closest(tmp_path: Path) -> None:
    source = folder(tmp_path, {"model_type": "lama"})
    assert read_config(source)["model_type"] == "lama"
    with pytest.raises(ModelError, match="unknown model type 'lama': did you mean llama"):
        read_config(source, known_model_types=["llama", "qwen3"])
    assert read_config(source, known_model_types=["lama"])["model_type"] == "lama"


def test_custom_code_is_named_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')\nclass Thing: pass\n"
    for name in ("configuration_odd", "tokenization_odd", "modeling_odd"):
        (tmp_path / f"{name}.py").write_text(code)
    auto_map = {"AutoConfig": "configuration_odd.Thing", "AutoModelForCausalLM": "modeling_odd.Thing"}
    source = folder(tmp_path, {"model_type": "odd", "auto_map": auto_map})
    with pytest.raises(ModelError, match=r"custom code from the model folder .auto_map.; such code is never run"):
        read_config(source, known_model_types=["llama"])
    tokenizer = {"tokenizer_class": "Thing", "auto_map": {"AutoTokenizer": ["tokenization_odd.Thing", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="give another one with --tokenizer"):
        load_auto_tokenizer(tmp_path)
    assert not marker.exists()


def test_text_config_of_multimodal_models() -> None:
    assert text_config({"vocab_size": 1, "text_config": {"vocab_size": 2}}) == {"vocab_size": 2}
    assert text_config({"vocab_size": 1}) == {"vocab_size": 1}


def test_generation_config(tmp_path: Path) -> None:
    assert read_generation_config(folder(tmp_path, {"model_type": "x"})) == {}
    assert read_generation_config(folder(tmp_path, {"model_type": "x"}, {"top_k": 5})) == {"top_k": 5}
    extra = {"general.sampling.temp": 0.5, "general.sampling.top_k": 64, "tokenizer.ggml.eos_token_id": 3}
    assert read_generation_config(gguf(tmp_path, extra)) == {"temperature": 0.5, "top_k": 64, "eos_token_id": 3}


def test_eos_is_the_union_of_all_files(tmp_path: Path) -> None:
    source = folder(
        tmp_path,
        {"model_type": "x", "eos_token_id": 1, "text_config": {"eos_token_id": 2}},
        {"eos_token_id": [3, 4]},
    )
    tokenizer = FakeTokenizer(frozenset({5}))
    assert eos_token_ids(source, tokenizer, vocab_size=10) == {1, 2, 3, 4, 5}
    assert eos_token_ids(source, None, vocab_size=10) == {1, 2, 3, 4}


@pytest.mark.parametrize("value", [None, -1, []])
def test_no_eos_is_an_empty_set(tmp_path: Path, value: object) -> None:
    source = folder(tmp_path, {"model_type": "x", "eos_token_id": value})
    assert eos_token_ids(source, FakeTokenizer(), vocab_size=10) == frozenset()


def test_eos_outside_the_vocabulary_is_fatal(tmp_path: Path) -> None:
    source = folder(tmp_path, {"model_type": "x"}, {"eos_token_id": 10})
    with pytest.raises(ModelError, match=r"generation_config\.json names the EOS id 10"):
        eos_token_ids(source, None, vocab_size=10)
    with pytest.raises(ModelError, match="the tokenizer names the EOS id 12"):
        eos_token_ids(folder(tmp_path, {"model_type": "x"}, {}), FakeTokenizer(frozenset({12})), vocab_size=10)
    with pytest.raises(ModelError, match="must be an integer"):
        eos_token_ids(folder(tmp_path, {"model_type": "x", "eos_token_id": "</s>"}, {}), None, vocab_size=10)


def test_eos_of_a_gguf_file_includes_the_end_of_turn(tmp_path: Path) -> None:
    """behaviours.md row 127: a file whose EOS is the base model's ran through `<end_of_turn>` to max_tokens."""
    tokens = ["<eos>", "<end_of_turn>", "<|im_end|>", "a"]
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eom_token_id": 3,
    }
    assert eos_token_ids(gguf(tmp_path, extra), None, vocab_size=VOCAB) == {0, 3}
    extra["tokenizer.chat_template"] = "{{ messages[0].content }}<end_of_turn>"
    assert eos_token_ids(gguf(tmp_path, extra), None, vocab_size=VOCAB) == {0, 1, 3}
