"""What Llama and Mistral configs may say, each against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.hub.source import resolve_model
from tests.kits.model import (
    BLOCK_SIZE,
    Row,
    Sequences,
    assert_close,
    check_all,
    check_prefill,
    greedy,
    load_case,
    load_model,
    make_case,
    prompt,
    save_tiny,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "head_dim": 16},
        {"num_key_value_heads": 4, "hidden_act": "gelu"},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        {"head_dim": None, "num_attention_heads": 2},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_options(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_prefill(make_case(tmp_path, "llama", **changes))


@pytest.mark.parametrize(
    "rope",
    [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}],
    ids=lambda rope: rope["rope_type"],
)
def test_ropes(tmp_path: Path, rope: dict[str, Any]) -> None:
    check_all(make_case(tmp_path, "llama", rope_parameters=rope))


def test_dynamic_rope_up_to_the_original_length_and_beyond_it_token_by_token(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    case = make_case(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=16)
    assert case.model.max_position == 32
    ids = prompt(16)
    (logits,) = Sequences(case.model).step([(Row(), ids)])
    assert_close(logits, case.logits(ids), "the original length")
    # transformers grows its frequencies with the sequence while it generates, and so does each new token here.
    case = load_case(case.source, save_tiny(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=16))
    assert greedy(case.model, prompt(12), 20) == case.greedy(prompt(12), 20)


@pytest.mark.parametrize("max_len", [32, None])
def test_longrope(tmp_path: Path, max_len: int | None) -> None:
    case = make_case(tmp_path, "llama", rope_parameters=LONGROPE, max_len=max_len)
    assert case.model.max_position == 128
    for length in (20, 32) if max_len == 32 else (33, 50):
        (logits,) = Sequences(case.model).step([(Row(), prompt(length))])
        assert_close(logits, case.logits(prompt(length)), f"prompt of {length} tokens")


def test_old_rope_keys(tmp_path: Path) -> None:
    case = make_case(tmp_path, "llama", rope_parameters=LLAMA3)
    config = json.loads((tmp_path / "config.json").read_text())
    keys = dict(config.pop("rope_parameters"))
    theta, kind = keys.pop("rope_theta"), keys.pop("rope_type")
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "rope_theta": theta, "rope_scaling": {"type": kind, **keys}})
    )
    model, _ = load_model(case.source)
    (logits,) = Sequences(model).step([(Row(), prompt(20))])
    assert_close(logits, case.logits(prompt(20)), "old keys")


def test_unknown_rope_is_fatal(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="unknown rope type 'spiral'"):
        load_model(resolve_model(str(tmp_path)))


def test_mistral_windows(tmp_path: Path) -> None:
    case = make_case(tmp_path, "mistral")
    assert [layer.spec.window for layer in case.model.layers] == [8, 8, 8]
    case = make_case(tmp_path / "none", "mistral", sliding_window=None)
    assert [layer.spec.window for layer in case.model.layers] == [None, None, None]
    check_prefill(case)
    # transformers takes one that lists its layers for a Ministral, whose windows are those.
    case = make_case(tmp_path / "listed", "mistral")
    config = json.loads((tmp_path / "listed" / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    (tmp_path / "listed" / "config.json").write_text(json.dumps({**config, "layer_types": kinds}))
    oracle = transformers.CONFIG_MAPPING["ministral"].from_pretrained(case.source.path)
    listed = load_case(
        case.source,
        transformers.AutoModelForCausalLM.from_pretrained(
            case.source.path, config=oracle, attn_implementation="eager", dtype=torch.float32
        ),
    )
    assert [layer.spec.window for layer in listed.model.layers] == [None, 8, None]
    check_prefill(listed)
    # A config that does not say has the window of the first Mistral; only a stated null has none.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(resolve_model(str(tmp_path)))
    assert model.layers[0].spec.window == 4096


def test_llama_has_no_window_whatever_its_config_says(tmp_path: Path) -> None:
    case = make_case(tmp_path, "llama", sliding_window=8)
    assert case.window is None


def test_sparse_config(tmp_path: Path) -> None:
    """Old configs leave out what they think is the default."""
    case = make_case(tmp_path, "llama", num_key_value_heads=4, rms_norm_eps=1e-6)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in kept}))
    model, _ = load_model(case.source)
    assert model.max_position == 2048
    (logits,) = Sequences(model).step([(Row(), prompt(3 * BLOCK_SIZE))])
    assert_close(logits, case.logits(prompt(3 * BLOCK_SIZE)), "sparse config")


def test_bfloat16_is_near_transformers_in_bfloat16(tmp_path: Path) -> None:
    case = make_case(tmp_path, "llama")
    model, _ = load_model(case.source, dtype=torch.bfloat16)
    ids = prompt(20)
    (logits,) = Sequences(model, dtype=torch.bfloat16).step([(Row(), ids)])
    exact = case.logits(ids)
    with torch.inference_mode():
        theirs = case.oracle.bfloat16()(torch.tensor([ids])).logits[0].float()
    ours_off, theirs_off = (float((x - exact).norm() / exact.norm()) for x in (logits, theirs))
    assert logits.dtype == torch.float32 and ours_off < 1.2 * theirs_off + 1e-3, (ours_off, theirs_off)
