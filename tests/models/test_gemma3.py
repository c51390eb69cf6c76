"""Gemma 3: two kinds of layers, caps, scales, and the text part of multimodal checkpoints."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.hub.source import resolve_model
from tests.kits.model import (
    WINDOW,
    Row,
    Sequences,
    assert_close,
    check_all,
    check_prefill,
    load_case,
    load_model,
    make_case,
    prompt,
    save_tiny,
)

FULL, SLIDING = "full_attention", "sliding_attention"
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_pre_attn_scalar": 20},
        {"final_logit_softcapping": 3.0},
        {"attention_bias": True},
        {"hidden_size": 40, "num_key_value_heads": 1},
        {"hidden_activation": "silu"},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ],
    ids=lambda changes: "+".join(changes),
)
def test_options(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_prefill(make_case(tmp_path, "gemma3_text", **changes))


def test_pattern_of_layers(tmp_path: Path) -> None:
    case = make_case(tmp_path, "gemma3_text", layer_types=None, num_hidden_layers=7)
    assert [layer.spec.window for layer in case.model.layers if layer.spec is not None] == [WINDOW] * 5 + [None] + [
        WINDOW
    ]
    check_all(case)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window_pattern": 3}))
    model, _ = load_model(case.source)
    assert [
        index for index, layer in enumerate(model.layers) if layer.spec is not None and layer.spec.window is None
    ] == [2, 5]


def test_old_rope_keys(tmp_path: Path) -> None:
    ropes = {
        FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 300.0},
    }
    case = make_case(tmp_path, "gemma3_text", rope_parameters=ropes)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    old = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **old}))
    model, _ = load_model(case.source)
    (logits,) = Sequences(model).step([(Row(), prompt(20))])
    assert_close(logits, case.logits(prompt(20)), "old keys")
    assert model.max_position == 128, "Gemma's config states the extended length"


def test_flat_rope_parameters_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma3_text")
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="rope_parameters"):
        load_model(resolve_model(str(tmp_path)))


def test_attention_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the key and does not use it for Gemma 3; its attention function, asked to, does."""
    from transformers.models.gemma3 import modeling_gemma3

    capped = functools.partial(modeling_gemma3.eager_attention_forward, softcap=0.5)
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    case = make_case(tmp_path, "gemma3_text", attn_logit_softcapping=0.5, query_pre_attn_scalar=1)
    spec: Any = case.model.layers[0].spec
    assert spec.soft_cap == 0.5
    check_prefill(case)


def test_embedding_scale_is_rounded_to_the_dtype(tmp_path: Path) -> None:
    case = make_case(tmp_path, "gemma3_text", hidden_size=40)
    model, _ = load_model(case.source, dtype=torch.bfloat16)
    ids = torch.tensor(prompt(5))
    want = case.oracle.bfloat16().model.embed_tokens(ids)
    assert torch.equal(model.embed(ids), want)


def multimodal(
    folder: Path, *, prefix: str, head_prefix: str, text_changes: dict[str, Any], top: dict[str, Any]
) -> None:
    """Turn a text checkpoint into what multimodal ones look like."""
    config = json.loads((folder / "config.json").read_text())
    text = {**config, **text_changes}
    text = {key: value for key, value in text.items() if value is not ...}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}, **top})
    )
    tensors = load_file(folder / FILE)
    renamed = {
        (head_prefix + name if name.startswith("lm_head") else prefix + name.removeprefix("model.")): value
        for name, value in tensors.items()
    }
    vision = prefix.replace("language_model.model.", "").replace("language_model.", "")
    renamed[f"{vision}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = torch.zeros(2, 2)
    renamed[f"{vision}multi_modal_projector.mm_input_projection_weight"] = torch.zeros(2, 2)
    save_file(renamed, folder / FILE)


@pytest.mark.parametrize(
    ("prefix", "head_prefix"), [("language_model.model.", "language_model."), ("model.language_model.", "")]
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_text_of_multimodal_checkpoints(tmp_path: Path, prefix: str, head_prefix: str, is_tied: bool) -> None:
    oracle = save_tiny(tmp_path, "gemma3_text", tie_word_embeddings=is_tied)
    multimodal(tmp_path, prefix=prefix, head_prefix=head_prefix, text_changes={}, top={})
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


@pytest.mark.parametrize("top", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("in_text", [..., True, False])
def test_the_tie_may_stand_in_either_config(tmp_path: Path, top: dict[str, Any], in_text: Any) -> None:
    save_tiny(tmp_path, "gemma3_text")  # has no head of its own
    multimodal(
        tmp_path, prefix="model.language_model.", head_prefix="", text_changes={"tie_word_embeddings": in_text}, top=top
    )
    is_tied = in_text if in_text is not ... else top.get("tie_word_embeddings", True)
    if is_tied:
        load_model(resolve_model(str(tmp_path)))
    else:
        with pytest.raises(ValueError, match=r"tensors missing: lm_head\.weight"):
            load_model(resolve_model(str(tmp_path)))


def test_published_text_configs_leave_out_most_keys(tmp_path: Path) -> None:
    from headrace.engine.build import build_model
    from headrace.layers.factory import LayerFactory
    from headrace.quant.none import Dense

    # What the 4B model's config.json states.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    dense = Dense()
    factory = LayerFactory(dtype=torch.bfloat16, recipe=lambda name: dense)
    model = build_model({"model_type": "gemma3", "text_config": text}, factory)
    assert (model.vocab_size, model.max_position, len(model.layers)) == (262_208, 131_072, 34)
    spec: Any = model.layers[0].spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window) == (8, 4, 256, 1024)
    # Published: 3.88 billion parameters in the language model.
    assert round(model.weight_map().weight_bytes / 2 / 1e9, 2) == 3.88


def test_bidirectional_models_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma3_text")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": True}))
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        load_model(resolve_model(str(tmp_path)))
