"""Models that the documents name by their totals: configs that give them.

The totals, the layers and how they mix, hidden sizes, experts and how many a token is sent to are the documents'
(GLM-5.3, Kimi-K3, Qwen3.5, Qwen3.8, MiniMax-M3, gpt-oss-120b). What they leave out is that of the family's config class
in transformers, or, marked `chosen`, a round number with which the total comes out: those are no published configs.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace.hub.rank_share import CacheTypes, Ranks, rank_groups, weight_bytes
from headrace.hub.read_shape import read_shape
from headrace.hub.shape import ModelShape, Storage

GLM_5 = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 78, "num_attention_heads": 64, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 1, "first_k_dense_replace": 3, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 32, "vocab_size": 154_880, "max_position_embeddings": 1_048_576,
}  # fmt: skip
QWEN_3_8 = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 8192, "num_hidden_layers": 92, "num_experts": 512,
    "num_experts_per_tok": 10, "vocab_size": 248_320, "max_position_embeddings": 262_144, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    # chosen
    "num_attention_heads": 64, "num_key_value_heads": 4, "linear_num_value_heads": 128,
    "moe_intermediate_size": 2048, "shared_expert_intermediate_size": 2048,
}  # fmt: skip
QWEN_3_5 = {
    **QWEN_3_8, "hidden_size": 4096, "num_hidden_layers": 60,
    # chosen
    "num_attention_heads": 32, "num_key_value_heads": 2, "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
}  # fmt: skip
MINIMAX_M3 = {
    "model_type": "minimax_m3_vl_text", "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 128,
    "num_experts_per_tok": 4, "dense_intermediate_size": 12_288, "shared_intermediate_size": 3072,
    "index_n_heads": 4, "index_head_dim": 128, "vocab_size": 200_064, "max_position_embeddings": 1_048_576,
    # chosen
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
}  # fmt: skip
KIMI_K3 = {
    "model_type": "kimi_linear", "num_hidden_layers": 93, "num_attention_heads": 96, "num_experts": 896,
    "num_experts_per_token": 16, "num_shared_experts": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163_840, "max_position_embeddings": 1_048_576,
    "layer_types": ["linear_attention" if layer % 4 else "full_attention" for layer in range(1, 94)],
    "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "num_expert_group": 1, "first_k_dense_replace": 1,
    # chosen
    "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 1536, "linear_num_heads": 96,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201_088,
}  # fmt: skip
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
        (KIMI_K3, 2.8e12, None),  # said with two digits
        (GPT_OSS, 117e9, None),  # 5.1B without the embedding
    ],
    ids=["GLM-5.3", "Qwen3.8-2.4T-A95B", "Qwen3.5-397B-A17B", "MiniMax-M3", "Kimi-K3", "gpt-oss-120b"],
)
def test_totals(config: dict[str, Any], total: float, used: float | None) -> None:
    shape = read_shape(config)
    assert shape.is_known and shape.num_parameters == pytest.approx(total, rel=0.015)
    if used is not None:
        experts = config.get("num_experts") or config["num_local_experts"]
        assert active(shape, experts, config["num_experts_per_tok"]) == pytest.approx(used, rel=0.03)


def test_active_parameters_of_glm() -> None:
    shape = read_shape(GLM_5)
    ends = 2 * shape.vocab_size * shape.hidden_size
    assert active(shape, 256, 8) - ends == pytest.approx(39e9, rel=0.03)


def test_active_parameters_of_gpt_oss() -> None:
    shape = read_shape(GPT_OSS)
    assert active(shape, 128, 4) - shape.vocab_size * shape.hidden_size == pytest.approx(5.1e9, rel=0.01)


def test_experts_of_kimi_k3_over_eight_ranks() -> None:
    """181 GB a rank, in MXFP4 with a scale for each 32."""
    shape = read_shape(KIMI_K3)
    storage = Storage("mxfp4", {"expert": 4.25})
    sizes = weight_bytes(
        shape, shape.layers, Ranks(8, expert=8), plain="bfloat16", storage=storage, first=True, last=True
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
    assert len(states.layers) == 70 and len(latents.layers) == 23
    assert latents.bytes_per_token == 23 * (512 + 64) * 2
    assert states.state_bytes == 70 * 12 * (128 * 128 + 3 * 128 * 3) * 2
    window, full = groups(GPT_OSS)
    assert (len(window.layers), window.window, len(full.layers)) == (18, 128, 18)
    assert window.bytes_per_token == full.bytes_per_token == 18 * 2 * 8 * 64 * 2
    states, heads = groups(QWEN_3_8)
    assert (len(states.layers), len(heads.layers)) == (69, 23)
    assert heads.bytes_per_token == 23 * 2 * 4 * 256 * 2
