"""What a model type does that its config doesn't say, and what it means by a key that a config leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.hub.mixers import Traits, Windows

_ALL = Windows(everywhere=True)
_QWEN_HYBRID = Traits(qk_norm="head", gated_query=True)
_GEMMA3 = Traits(qk_norm="head", num_norms=4, is_tied=True, windows=Windows(full_every=6))
_GEMMA4 = Traits(
    qk_norm="head", num_norms=4, is_tied=True, windows=Windows(full_every=6, ends_full=True), layer_factor=True
)
TRAITS: Mapping[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(windows=_ALL),
    "mixtral": Traits(windows=_ALL),
    "qwen2_moe": Traits(bias_key="qkv_bias", out_bias=False, windows=Windows(early=True, by_flag=True)),
    "glm4_moe": Traits(qk_norm="head", out_bias=False, router="wide"),
    "llama4": Traits(),
    "llama4_text": Traits(),
    "phi3": Traits(windows=_ALL),
    "ministral": Traits(windows=_ALL),
    "ministral3": Traits(windows=_ALL),
    "mistral3": Traits(windows=_ALL),
    "granite": Traits(),
    "seed_oss": Traits(),
    "smollm3": Traits(is_tied=True),
    "olmo2": Traits(qk_norm="all"),
    "olmo3": Traits(qk_norm="all", windows=Windows(full_every=4)),
    "exaone4": Traits(qk_norm="head", windows=Windows(full_every=4)),
    "cohere2": Traits(num_norms=1, is_tied=True, windows=Windows(full_every=4)),
    "glm4": Traits(num_norms=4, out_bias=False),
    "nemotron": Traits(norm_bias=True, gated_mlp=False),
    "hunyuan_v1_dense": Traits(qk_norm="head"),
    "qwen2": Traits(qkv_bias=True, out_bias=False, windows=Windows(by_flag=True)),
    "qwen3": Traits(qk_norm="head", windows=Windows(by_flag=True)),
    "qwen3_moe": Traits(qk_norm="head"),
    "gemma2": Traits(num_norms=4, is_tied=True, windows=Windows(full_every=2)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "deepseek_v2": Traits(router="float32"),
    "deepseek_v3": Traits(),
    "deepseek_v32": Traits(),
    "deepseek_v4": Traits(router="wide"),
    "kimi_k2": Traits(),
    "kimi_linear": Traits(router="wide"),
    "kimi_k3": Traits(router="wide"),
    "glm_moe_dsa": Traits(),
    "glm5_next": Traits(),
    "glm5_next_text": Traits(),
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "minimax_m2": Traits(qk_norm="all", router="corrected"),
    "minimax_m3_vl_text": Traits(qk_norm="head", router="corrected"),
    "gpt_oss": Traits(head_logits=True, windows=Windows(full_every=2)),
    "nemotron_h": Traits(num_norms=1, parts="mixer | MLP", gated_mlp=False, router="wide"),
    "mamba2": Traits(num_norms=1, parts="mixer | MLP", is_recurrent=True),
    "granitemoehybrid": Traits(is_recurrent=True),
    "falcon_h1": Traits(num_norms=1, parts="state + heads, MLP"),
}

_WINDOWS = frozenset({"layer_types", "sliding_window"})
_BIAS = frozenset({"attention_bias"})
UNREAD: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("llama", "granite", "glm4", "glm4_moe", "hunyuan_v1_dense", "nemotron", "olmo2", "seed_oss"), _WINDOWS
    ),
    **dict.fromkeys(("mixtral", "ministral3", "phi3"), frozenset({"layer_types"}) | _BIAS),
    **dict.fromkeys(("exaone4", "ministral", "minimax_m3_vl_text"), _BIAS),
    **dict.fromkeys(("deepseek_v4", "nemotron_h"), frozenset({"n_shared_experts"})),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), frozenset({"first_k_dense_replace"})),
    "minimax_m2": _WINDOWS | _BIAS,
    "qwen3_moe": frozenset({"layer_types", "max_window_layers"}),
}
"""Keys that other types go by and these don't, in transformers as here: `DEFAULTS` holds whatever a config states."""

OWN_NAMES = frozenset({"kimi_k3"})
"""Of multimodal models whose language model goes by another's."""

STATED_POSITIONS = frozenset({
    "deepseek_v4", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm5_next", "glm5_next_text", "granitemoehybrid",
    "kimi_k3", "kimi_linear", "mamba2", "nemotron_h", "phi3",
})  # fmt: skip
"""Model types whose `max_position_embeddings` counts what their ropes are stretched to, if they have any."""

_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}  # fmt: skip
_GEMMA4_DEFAULTS = {
    **_GEMMA3_DEFAULTS, "vocab_size": 262_144, "num_hidden_layers": 30, "global_head_dim": 512, "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "enable_moe_block": False,
}  # fmt: skip
_GEMMA2_DEFAULTS = {**_GEMMA3_DEFAULTS, "vocab_size": 256_000, "max_position_embeddings": 8192}
_LLAMA4_DEFAULTS = {
    "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
    "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1,
}  # fmt: skip
_GLM5_NEXT_DEFAULTS = {
    "max_position_embeddings": 1_048_576, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "n_routed_experts": 288, "num_experts_per_tok": 8, "n_group": 1, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256, "index_topk": 2048,
    "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16, "hc_mult": 4, "linear_head_dim": 128,
    "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "first_k_dense_replace": 3,
}  # fmt: skip
_DEEPSEEK_V3_DEFAULTS = {
    "max_position_embeddings": 4096, "num_attention_heads": 128, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "num_experts_per_tok": 8,
}  # fmt: skip
_MINIMAX_M3_DEFAULTS = {
    "max_position_embeddings": 524_288, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 4,
    "num_experts": 128, "intermediate_size": 3072, "dense_intermediate_size": 12_288,
    "shared_intermediate_size": 3072, "index_n_heads": 4, "index_head_dim": 128,
}  # fmt: skip
_QWEN_HYBRID_DEFAULTS = {
    "max_position_embeddings": 32_768, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_key_value_heads": 2,
}  # fmt: skip
_QWEN_HYBRID_MOE_DEFAULTS = {
    **_QWEN_HYBRID_DEFAULTS, "num_experts_per_tok": 8, "num_experts": 256, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_QWEN35_DEFAULTS = {**_QWEN_HYBRID_DEFAULTS, "num_key_value_heads": 4}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        **_DEEPSEEK_V3_DEFAULTS, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _DEEPSEEK_V3_DEFAULTS,
    "kimi_k2": _DEEPSEEK_V3_DEFAULTS,
    "deepseek_v32": {
        **_DEEPSEEK_V3_DEFAULTS, "max_position_embeddings": 163_840, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 64,
    },
    "glm_moe_dsa": {
        **_DEEPSEEK_V3_DEFAULTS, "max_position_embeddings": 202_752, "num_attention_heads": 64, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 32,
    },
    "minimax_m3_vl": _MINIMAX_M3_DEFAULTS,
    "minimax_m3_vl_text": _MINIMAX_M3_DEFAULTS,
    "qwen3_5": _QWEN35_DEFAULTS,
    "qwen3_5_text": _QWEN35_DEFAULTS,
    "qwen3_5_moe": _QWEN_HYBRID_MOE_DEFAULTS,
    "qwen3_5_moe_text": _QWEN_HYBRID_MOE_DEFAULTS,
    "qwen3_next": {**_QWEN_HYBRID_MOE_DEFAULTS, "num_experts_per_tok": 10, "num_experts": 512},
    "glm5_next": _GLM5_NEXT_DEFAULTS,
    "glm5_next_text": _GLM5_NEXT_DEFAULTS,
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "ministral": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "ministral3": {"max_position_embeddings": 262_144, "num_key_value_heads": 8, "head_dim": 128},
    "mistral3": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "granite": {"max_position_embeddings": 2048},
    "seed_oss": {
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "smollm3": {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    "phi3": {"max_position_embeddings": 4096},
    "olmo2": {"max_position_embeddings": 2048},
    "olmo3": {"max_position_embeddings": 2048, "sliding_window": 4096},
    "exaone4": {"max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096},
    "cohere2": {"max_position_embeddings": 8192, "sliding_window": 4096},
    "glm4": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
    },
    "nemotron": {"max_position_embeddings": 4096},
    "hunyuan_v1_dense": {"max_position_embeddings": 2048},
    "gemma2": _GEMMA2_DEFAULTS,
    "qwen2": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128,
        "num_key_value_heads": 32,
    },
    "mixtral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "glm4_moe": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "use_qk_norm": False,
    },
    "minimax_m2": {
        "max_position_embeddings": 196_608, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256,
        "num_experts_per_tok": 8, "intermediate_size": 1536,
    },
    "gpt_oss": {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "num_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880, "attention_bias": True,
    },
    "llama4": _LLAMA4_DEFAULTS,
    "llama4_text": _LLAMA4_DEFAULTS,
    "gemma3": _GEMMA3_DEFAULTS,
    "gemma3_text": _GEMMA3_DEFAULTS,
    "gemma4": _GEMMA4_DEFAULTS,
    "gemma4_text": _GEMMA4_DEFAULTS,
    "deepseek_v4": {
        "max_position_embeddings": 1_048_576, "head_dim": 512, "q_lora_rank": 1024, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "sliding_window": 128,
        "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "hc_mult": 4,
    },
    "kimi_linear": {
        "model_max_length": 1_048_576, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "nemotron_h": {
        "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "mlp_hidden_act": "relu2",
        "n_shared_experts": 1,
    },
    "mamba2": {
        "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "max_position_embeddings": 1_048_576,
    },
    "falcon_h1": {
        "max_position_embeddings": 8192, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_head": "auto", "mamba_d_ssm": 1024, "mamba_rms_norm": False, "projectors_bias": False,
    },
    "granitemoehybrid": {
        "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_head": "auto",
    },
}  # fmt: skip
"""What transformers takes for keys that a config leaves out."""
