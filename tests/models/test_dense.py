"""What the configs and checkpoints of the dense families may say beside the contract's rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.attention.torch import TorchAttention
from headrace.attention.triton import TritonAttention
from headrace.engine.groups import group_layers
from headrace.hub.source import resolve_model
from tests.kits.model import (
    Row,
    Sequences,
    assert_close,
    check_prefill,
    load_case,
    load_model,
    make_case,
    prompt,
    wrap_tiny,
)
from tests.kits.model import save_tiny as save
from tests.kits.tiny import FULL, SLIDING, WINDOW

FILE = "model.safetensors"
DENSE = (
    "gemma2", "gemma4_text", "phi3", "olmo2", "olmo3", "granite", "cohere2", "exaone4", "smollm3", "seed_oss", "glm4",
    "ministral", "ministral3", "nemotron", "hunyuan_v1_dense",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("checkpoint") for name in (*DENSE, "gemma4_text small")}
    for model_type, folder in made.items():
        save(folder, model_type)
    return made


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """The checkpoint with another config; ... takes a key away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    (target / FILE).unlink(missing_ok=True)
    (target / FILE).hardlink_to(folder / FILE)
    return target


def windows(folder: Path) -> list[int | None]:
    model, _ = load_model(resolve_model(str(folder)))
    return [layer.spec.window for layer in model.layers if layer.spec is not None]


# ---- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", DENSE)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 48}, "of a wrong shape: .*mlp"),
        (
            {"num_hidden_layers": 2, "layer_types": ..., "no_rope_layers": ..., "sliding_window": 8},
            "unexpected: .*layers.2",
        ),
        ({"hidden_act": "snake", "hidden_activation": "snake"}, "unknown activation 'snake'"),
        (
            {"rope_parameters": {"rope_type": "spiral"}, "rope_scaling": {"rope_type": "spiral"}},
            "unknown rope type 'spiral'",
        ),
    ],
    ids=["mlp", "layers", "activation", "rope"],
)
def test_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    if "rope_parameters" in changes and model_type == "gemma4_text":
        changes = {"rope_parameters": {FULL: {"rope_type": "spiral"}, SLIDING: {"rope_type": "spiral"}}}
    with pytest.raises(ValueError, match=message) as raised:
        load_model(resolve_model(str(changed(folders[model_type], tmp_path, **changes))))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model_type", ["gemma2", "cohere2", "olmo3", "exaone4", "gemma4_text", "ministral"])
def test_unknown_kinds_of_layers(folders: dict[str, Path], tmp_path: Path, model_type: str) -> None:
    kinds = [SLIDING, "spiral_attention", FULL]
    with pytest.raises(ValueError, match="layer_types has the unknown 'spiral_attention'"):
        load_model(resolve_model(str(changed(folders[model_type], tmp_path, layer_types=kinds))))


def test_a_missing_fused_tensor_has_the_name_of_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["phi3"] / FILE)
    del tensors["model.layers.1.self_attn.qkv_proj.weight"]
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_bytes((folders["phi3"] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        load_model(resolve_model(str(tmp_path)))


def test_gemma4_layers_that_share_need_one_that_keeps(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_kv_shared_layers 2 of 3 layers leaves no full_attention"):
        load_model(resolve_model(str(changed(folders["gemma4_text"], tmp_path, num_kv_shared_layers=2))))


def test_ministral3_takes_its_temperature_from_where_its_rope_is(folders: dict[str, Path], tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    path = changed(folders["ministral3"], tmp_path, rope_scaling=rope)
    with pytest.raises(ValueError, match="rope_scaling lacks the key 'llama_4_scaling_beta'"):
        load_model(resolve_model(str(path)))


def test_smollm3_slides_where_its_layers_are_listed_so(folders: dict[str, Path], tmp_path: Path) -> None:
    """As transformers masks them, whatever `use_sliding_window` says."""
    path = changed(folders["smollm3"], tmp_path, use_sliding_window=False)
    assert windows(path) == [WINDOW, None, WINDOW]


def test_lists_of_another_length(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_rope_layers must be a list of 3"):
        load_model(resolve_model(str(changed(folders["smollm3"], tmp_path, no_rope_layers=[1]))))
    with pytest.raises(ValueError, match="sliding_window_pattern must be of the letters"):
        path = changed(folders["exaone4"], tmp_path, layer_types=..., sliding_window_pattern="LX")
        load_model(resolve_model(str(path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "cohere2",
        "glm4",
        "gemma2",
        "gemma4_text",
        "gemma4_text small",
        "hunyuan_v1_dense",
        "ministral3",
        "nemotron",
        "olmo2",
    ],
)
def test_the_gpu_backend_under_the_interpreter(folders: dict[str, Path], model_type: str) -> None:
    """No rope, neighbouring pairs of half a head, caps, norms after rope, a temperature: as the oracle has it."""
    model, _ = load_model(resolve_model(str(folders[model_type])))
    ids = prompt(13)
    got: list[torch.Tensor] = []
    for backend in (TorchAttention(), TritonAttention()):
        sequences, row = Sequences(model, backend=backend), Row()
        parts = [sequences.step([(row, ids[begin:end])])[0] for begin, end in ((0, 9), (9, 12), (12, 13))]
        got.append(torch.cat(parts))
    assert_close(got[1], got[0], "Triton")


def test_the_gpu_backend_refuses_heads_that_it_has_no_tiles_for() -> None:
    assert TritonAttention().block_shape((2, 512), 32) == (2, 32, 512)
    with pytest.raises(ValueError, match="at most 512 features, and this model's have 576: set attn_backend"):
        TritonAttention().block_shape((2, 576), 32)


# ---- what configs may say --------------------------------------------------------------------


def test_patterns_of_layers_that_configs_leave_out(folders: dict[str, Path], tmp_path: Path) -> None:
    def of(model_type: str, **changes: Any) -> list[int | None]:
        return windows(changed(folders[model_type], tmp_path, layer_types=..., **changes))

    assert of("gemma2") == [WINDOW, None, WINDOW]
    assert of("olmo3") == [WINDOW] * 3
    assert of("cohere2", sliding_window_pattern=2) == [WINDOW, None, WINDOW]
    assert of("exaone4", sliding_window_pattern="LG") == [WINDOW, None, WINDOW]
    assert of("exaone4", sliding_window=None) == [None] * 3
    assert of("smollm3") == [WINDOW, None, WINDOW]
    assert of("smollm3", use_sliding_window=False) == [None] * 3
    assert of("ministral") == [WINDOW] * 3


def test_exaone_without_windows_turns_every_layer(tmp_path: Path) -> None:
    check_prefill(make_case(tmp_path, "exaone4", sliding_window=None, layer_types=[FULL] * 3))


@pytest.mark.parametrize("max_len", [32, None])
def test_phi3_longrope(tmp_path: Path, max_len: int | None) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1], "long_factor": [1.5, 2.0],
    }  # fmt: skip
    case = make_case(
        tmp_path,
        "phi3",
        max_len=max_len,
        rope_parameters=rope,
        original_max_position_embeddings=32,
        sliding_window=None,
    )
    for length in (20, 32) if max_len == 32 else (33, 50):
        (logits,) = Sequences(case.model).step([(Row(), prompt(length))])
        assert_close(logits, case.logits(prompt(length)), f"prompt of {length} tokens")


def test_olmo3_scales_only_full_layers_in_older_configs(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    ropes = {FULL: {**yarn, "rope_theta": 500_000.0}, SLIDING: {"rope_type": "default", "rope_theta": 500_000.0}}
    oracle = save(tmp_path, "olmo3", rope_parameters=ropes)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 500_000.0, "rope_scaling": yarn}))
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


def test_gemma4_factor_and_older_sizes(tmp_path: Path) -> None:
    oracle = save(tmp_path, "gemma4_text")
    tensors = load_file(tmp_path / FILE)
    for index, layer in enumerate(oracle.model.layers):
        layer.layer_scalar.fill_(0.5 + index)
        tensors[f"model.layers.{index}.layer_scalar"] = torch.tensor([0.5 + index])
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["per_layer_config"]
    sizes = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


@pytest.mark.parametrize("text", ["mistral", "ministral3"])
@pytest.mark.parametrize(
    ("prefix", "head_prefix", "beside"),
    [("language_model.model.", "language_model.", "vision_tower"), ("model.language_model.", "", "model.vision_tower")],
)
def test_text_of_mistral3(tmp_path: Path, text: str, prefix: str, head_prefix: str, beside: str) -> None:
    oracle = save(tmp_path, text)
    wrap_tiny(tmp_path, "mistral3", prefix=prefix, head_prefix=head_prefix, beside=beside)
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


def test_mistral3_of_an_unknown_language_model(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    wrap_tiny(tmp_path, "mistral3", prefix="model.language_model.", head_prefix="", beside="vision_tower")
    with pytest.raises(ValueError, match="the language model 'llama' is not served"):
        load_model(resolve_model(str(tmp_path)))


def test_text_of_gemma4(tmp_path: Path) -> None:
    oracle = save(tmp_path, "gemma4_text")
    wrap_tiny(tmp_path, "gemma4", prefix="model.language_model.", head_prefix="", beside="model.audio_tower")
    check_prefill(load_case(resolve_model(str(tmp_path)), oracle))


def test_gemma4_keys_of_layers_that_share_are_passed_by(tmp_path: Path) -> None:
    """Published checkpoints of the small models have them; the cache keeps those of two layers."""
    oracle = save(tmp_path, "gemma4_text small")
    tensors = load_file(tmp_path / FILE)
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"model.layers.0.self_attn.{part}.weight"
        tensors[f"model.layers.3.self_attn.{part}.weight"] = tensors[name].clone()
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    case = load_case(resolve_model(str(tmp_path)), oracle)
    check_prefill(case)
    groups = group_layers(case.model.layers, torch.float32)
    assert [(group.layers, group.window) for group in groups] == [((0,), None), ((1,), WINDOW)]
