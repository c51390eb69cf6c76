"""Models that are known by their published totals: the configs of `hub/outlines` give them, and can be planned by name.

The totals, the layers and how they mix, hidden sizes, experts and how many a token is sent to are published. What is
not is that of the family's config class in transformers, or a round number with which the total comes out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.hub.config_only import find_config
from headrace.hub.errors import ModelError
from headrace.hub.outlines import find_outline, near_outline, outline_names
from headrace.hub.rank_share import CacheTypes, Ranks, rank_groups, weight_bytes
from headrace.hub.read_shape import read_shape
from headrace.hub.shape import ModelShape

GLM_5, QWEN_3_8, QWEN_3_5 = (find_config(name) for name in ("glm-5.3", "qwen3.8-2.4t-a95b", "qwen3.5-397b-a17b"))
MINIMAX_M3, KIMI_K3, GPT_OSS = (find_config(name) for name in ("minimax-m3", "kimi-k3", "gpt-oss-120b"))
LLAMA_70B = find_config("llama-3.1-70b")
BF16 = CacheTypes("bfloat16", "bfloat16", "bfloat16")


def active(shape: ModelShape, experts: int, chosen: int) -> float:
    """Parameters that one token meets."""
    routed = sum(weight.count for layer in shape.layers for weight in layer.weights if weight.split == "experts")
    return shape.num_parameters - routed + routed * chosen / experts


@pytest.mark.parametrize(
    ("config", "total", "used"),
    [
        (GLM_5, 743e9, None),  # 39B without embedding and head
        (QWEN_3_8, 2.4e12, 95e9),
        (QWEN_3_5, 397e9, 17e9),
        (MINIMAX_M3, 427e9, 26e9),
        (KIMI_K3, 2.78e12, 104e9),
        (GPT_OSS, 117e9, None),  # 5.1B without the embedding
        (LLAMA_70B, 70.6e9, None),
    ],
    ids=["GLM-5.3", "Qwen3.8-2.4T-A95B", "Qwen3.5-397B-A17B", "MiniMax-M3", "Kimi-K3", "gpt-oss-120b", "Llama 3.1 70B"],
)
def test_totals(config: dict[str, Any], total: float, used: float | None) -> None:
    shape = read_shape(config)
    assert shape.is_known and shape.num_parameters == pytest.approx(total, rel=0.015)
    if used is not None:
        text = config.get("text_config", config)
        experts = text.get("num_experts") or text["num_local_experts"]
        chosen = text.get("num_experts_per_tok") or text["num_experts_per_token"]
        assert active(shape, experts, chosen) == pytest.approx(used, rel=0.03)


def test_active_parameters_of_glm() -> None:
    shape = read_shape(GLM_5)
    ends = 2 * shape.vocab_size * shape.hidden_size
    assert active(shape, 256, 8) - ends == pytest.approx(39e9, rel=0.03)


def test_active_parameters_of_gpt_oss() -> None:
    shape = read_shape(GPT_OSS)
    assert active(shape, 128, 4) - shape.vocab_size * shape.hidden_size == pytest.approx(5.1e9, rel=0.01)


def test_experts_of_kimi_k3_over_eight_ranks() -> None:
    """181 GB a rank, in MXFP4 with a scale for each 32, as the checkpoint states it."""
    shape = read_shape(KIMI_K3)
    assert shape.storage.bits == {"expert": 4.25}
    sizes = weight_bytes(
        shape, shape.layers, Ranks(8, expert=8), plain="bfloat16", storage=shape.storage, first=True, last=True
    )
    assert sizes["expert"] == pytest.approx(181e9, rel=0.005)


def groups(config: dict[str, Any], **ranks: Any) -> list[Any]:
    shape = read_shape(config)
    return [group.spec for group in rank_groups(shape.layers, range(len(shape.layers)), Ranks(**ranks), BF16)]


def test_bytes_of_a_token() -> None:
    (glm,) = groups(GLM_5, tensor=8)
    assert glm.bytes_per_token == 78 * (512 + 64 + 128) * 2
    full, sparse = groups(MINIMAX_M3, tensor=4)
    assert full.bytes_per_token == 3 * 2 * 128 * 2 and sparse.bytes_per_token == 57 * (2 * 128 + 128) * 2
    states, latents = groups(KIMI_K3, tensor=8)
    assert len(states.layers) == 69 and len(latents.layers) == 24
    assert latents.bytes_per_token == 24 * (512 + 64) * 2
    assert states.state_bytes == 69 * 12 * (128 * 128 + 3 * 128 * 3) * 2
    window, full = groups(GPT_OSS)
    assert (len(window.layers), window.window, len(full.layers)) == (18, 128, 18)
    assert window.bytes_per_token == full.bytes_per_token == 18 * 2 * 8 * 64 * 2
    states, heads = groups(QWEN_3_8)
    assert (len(states.layers), len(heads.layers)) == (69, 23)
    assert heads.bytes_per_token == 23 * 2 * 4 * 256 * 2
    (heads,) = groups(LLAMA_70B)
    assert heads.bytes_per_token == 327_680


@pytest.mark.parametrize("name", outline_names())
def test_every_outline_says_what_it_is(name: str) -> None:
    outline = find_outline(name.upper())
    assert outline is not None and outline.written_from.startswith("Written from the published")
    assert read_shape(outline.config).is_known


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kimi-k3").mkdir()
    assert find_outline("kimi-k3") is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [("qwen3.8", "qwen3.8-2.4t-a95b"), ("kimi_k3", "kimi-k3"), ("GLM-5", "glm-5.3"), ("llama-3.1", "llama-3.1-70b")],
)
def test_a_name_that_is_almost_one(name: str, meant: str) -> None:
    with pytest.raises(ModelError, match=f"no model '{name}': did you mean '{meant}'"):
        find_config(name)
    assert near_outline("my-model") is near_outline("") is None
