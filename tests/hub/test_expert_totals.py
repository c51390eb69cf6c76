"""Published sizes of models with experts, from the numbers of their configs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.hub.read_shape import read_shape
from headrace.hub.shape import AttentionShape

QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40_960,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131_072,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GLM_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 151_552,
    "attention_bias": True, "use_qk_norm": False, "num_experts_per_tok": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 202_048,
        "no_rope_layers": [], "attention_chunk_size": 8192, "max_position_embeddings": 10_485_760,
    },
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
    "num_experts_per_tok": 8, "vocab_size": 200_064, "max_position_embeddings": 196_608,
}  # fmt: skip
MAVERICK = {**SCOUT, "text_config": {**SCOUT["text_config"], "num_local_experts": 128, "interleave_moe_layer_step": 2}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN, 30.5), (GPT_OSS, 20.9), (GLM_AIR, 106.9), (SCOUT, 107.8), (MINIMAX, 228.7), (MAVERICK, 400.7)],
    ids=["Qwen3-30B-A3B", "gpt-oss-20b", "GLM-4.5-Air", "Llama 4 Scout, text", "MiniMax-M2", "Llama 4 Maverick, text"],
)
def test_parameters(config: dict[str, Any], billions: float) -> None:
    assert round(read_shape(config).num_parameters / 1e9, 1) == billions


def test_chunks_are_windows_in_three_of_four_layers() -> None:
    windows = [layer.mixer.window for layer in read_shape(SCOUT).layers if isinstance(layer.mixer, AttentionShape)]
    assert windows == [8192, 8192, 8192, None] * 12


def test_experts_of_gpt_oss_are_packed() -> None:
    shape = read_shape(GPT_OSS)
    assert shape.storage.bits_of("expert", 16) == 4.25 and shape.storage.bits_of("linear", 16) == 16
