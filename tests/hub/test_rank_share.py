"""What a rank holds: known models' sizes by the published formulas."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.hub.errors import ModelError
from headrace.hub.rank_share import CacheTypes, PlannedGroup, Ranks, rank_groups, weight_bytes
from headrace.hub.read_shape import read_shape
from headrace.hub.shape import PLAIN, ModelShape
from headrace.hub.storage import BITS, quantised

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129_280,
    "max_position_embeddings": 163_840, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151_936,
    "max_position_embeddings": 262_144, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
BF16 = CacheTypes("bfloat16", "bfloat16", "bfloat16")


def groups(config: dict[str, Any], types: CacheTypes = BF16, **ranks: Any) -> list[PlannedGroup]:
    shape = read_shape(config)
    return rank_groups(shape.layers, range(len(shape.layers)), Ranks(**ranks), types)


def total_bytes(shape: ModelShape, storage: Any = PLAIN, **ranks: Any) -> int:
    sizes = weight_bytes(shape, shape.layers, Ranks(**ranks), plain="bfloat16", storage=storage, first=True, last=True)
    return sum(sizes.values())


def test_gqa() -> None:
    (group,) = groups(LLAMA_70B)
    assert group.spec.bytes_per_token == 2 * 80 * 8 * 128 * 2 == 327_680 and group.kind == "GQA"
    assert group.formula == "2 x 80 layers x 8 KV heads x 128 x 2 bytes"
    (mha,) = groups({**LLAMA_70B, "num_key_value_heads": 64})
    (mqa,) = groups({**LLAMA_70B, "num_key_value_heads": 1})
    assert mha.spec.bytes_per_token == 8 * 327_680 and mha.kind == "MHA"
    assert mqa.spec.bytes_per_token == 327_680 // 8 and mqa.kind == "MQA"
    (fp8,) = groups(LLAMA_70B, CacheTypes("fp8", "bfloat16", "bfloat16"))
    assert fp8.spec.bytes_per_token == 327_680 // 2


@pytest.mark.parametrize(("tensor", "kv_heads", "replicas"), [(1, 8, 1), (4, 2, 1), (8, 1, 1), (16, 1, 2), (64, 1, 8)])
def test_kv_heads_are_repeated_when_there_are_more_ranks(tensor: int, kv_heads: int, replicas: int) -> None:
    (group,) = groups(LLAMA_70B, tensor=tensor)
    assert (group.spec.num_kv_heads, group.replicas) == (kv_heads, replicas)
    assert group.spec.bytes_per_token == 2 * 80 * kv_heads * 128 * 2
    (whole,) = groups(LLAMA_70B, tensor=tensor, attention_data=True)
    assert whole.spec.bytes_per_token == 327_680 and whole.replicas == 1


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size 128 is too large for 64 attention heads"):
        groups(LLAMA_70B, tensor=128)


def test_a_latent_is_on_every_rank() -> None:
    for tensor in (1, 8):
        (group,) = groups(DEEPSEEK_V3, tensor=tensor)
        assert group.spec.bytes_per_token == 61 * (512 + 64) * 2 == 70_272
        assert group.replicas == tensor and group.kind == "MLA"
    (indexed,) = groups({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64,
                         "index_head_dim": 128})  # fmt: skip
    assert indexed.spec.bytes_per_token == 70_272 + 61 * 128 * 2


def test_a_recurrent_state_does_not_grow() -> None:
    recurrent, attention = groups(QWEN3_NEXT)
    assert recurrent.spec.is_recurrent and recurrent.spec.layers[:4] == (0, 1, 2, 4)
    conv = (2 * 16 * 128 + 32 * 128) * 3
    assert recurrent.spec.state_bytes == 36 * (32 * 128 * 128 + conv) * 2
    assert attention.spec.bytes_per_token == 2 * 12 * 2 * 256 * 2
    exact, _ = groups(QWEN3_NEXT, CacheTypes("bfloat16", "float32", "bfloat16"))
    assert exact.spec.state_bytes == 36 * (32 * 128 * 128 * 4 + conv * 2)
    shared, _ = groups(QWEN3_NEXT, tensor=4)
    assert shared.spec.state_bytes == recurrent.spec.state_bytes // 4


def test_windows_and_sinks_as_configured() -> None:
    types = CacheTypes("bfloat16", "bfloat16", "bfloat16", windows=(None, 256) * 40, sink_tokens=4)
    full, window = groups(LLAMA_70B, types)
    assert (full.spec.window, full.spec.sink_tokens) == (None, 0)
    assert (window.spec.window, window.spec.sink_tokens, len(window.spec.layers)) == (256, 4, 40)


def test_weights_of_known_models() -> None:
    llama, deepseek = read_shape(LLAMA_70B), read_shape(DEEPSEEK_V3)
    assert llama.num_parameters == 70_553_706_496  # Llama 3.1 70B
    assert total_bytes(llama) == 2 * llama.num_parameters
    assert deepseek.num_parameters == pytest.approx(671e9, rel=0.001)
    assert total_bytes(deepseek, deepseek.storage) == pytest.approx(
        671e9 + 1.9e9, rel=0.005
    )  # head, embedding in 16 bits
    assert read_shape(QWEN3_NEXT).num_parameters == pytest.approx(79.7e9, rel=0.002)


def test_weights_over_ranks() -> None:
    llama = read_shape(LLAMA_70B)
    norms = 2 * (80 * 2 + 1) * 8192
    assert total_bytes(llama, tensor=8) == (total_bytes(llama) - norms) // 8 + norms
    deepseek = read_shape(DEEPSEEK_V3)
    experts = 58 * 256 * 3 * 7168 * 2048
    for ranks in ({"tensor": 8, "expert": 8}, {"tensor": 8}, {"tensor": 8, "expert": 2}):
        sizes = weight_bytes(
            deepseek, deepseek.layers, Ranks(**ranks), plain="bfloat16", storage=PLAIN, first=True, last=True
        )
        assert sizes["expert"] == 2 * experts // 8
    replicated = total_bytes(deepseek, tensor=8, expert=8, attention_data=True)
    assert replicated > total_bytes(deepseek, tensor=8, expert=8)


def test_quantised_weights() -> None:
    llama = read_shape(LLAMA_70B)
    ends = 2 * 128_256 * 8192 * 2
    for name, bits in (("fp8", BITS["fp8"]), ("nvfp4", 4.5), ("int4", 4 + 20 / 128)):
        linears = llama.num_parameters - 2 * 128_256 * 8192
        assert total_bytes(llama, quantised(name)) == pytest.approx(linears * bits / 8 + ends, rel=0.001)


def test_weights_of_pipeline_stages() -> None:
    llama = read_shape({**LLAMA_70B, "tie_word_embeddings": True})

    def stage(layers: range, *, first: bool, last: bool) -> int:
        held = [llama.layers[place] for place in layers]
        sizes = weight_bytes(llama, held, Ranks(), plain="bfloat16", storage=PLAIN, first=first, last=last)
        return sum(sizes.values())

    table = 128_256 * 8192 * 2  # a tied head on another stage is a second copy
    parts = stage(range(40), first=True, last=False) + stage(range(40, 80), first=False, last=True)
    assert parts == stage(range(80), first=True, last=True) + table
