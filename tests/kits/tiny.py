"""Tiny configs, a row a model type: what a model file's contract runs on. A new model adds one if TINY won't do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kits.tiny_latent import DEEPSEEK_V4, GLM5_NEXT, INDEXER, LATENT
from tests.kits.tiny_latent import YARN as YARN
from tests.kits.tiny_mamba import MAMBA_ROWS

WINDOW = 8
VOCAB_SIZE = 101
FULL, SLIDING = "full_attention", "sliding_attention"
LARGE_EPS = 0.001
"""Of norms: one that takes another than the config's shows in the logits."""

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": LARGE_EPS,
    "layer_norm_eps": LARGE_EPS,
    "layer_norm_epsilon": LARGE_EPS,
    "norm_eps": LARGE_EPS,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "layer_types": [SLIDING, FULL, SLIDING],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Keys that configs of decoder models share; a model is given those that its config class declares."""


DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}


@dataclass(frozen=True)
class TinyModel:
    """One model type's tiny config, and the proof that the prompts of the contract reach what it is about."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the config, in place of TINY's or beside them."""
    branches: Mapping[str, Any] = field(default_factory=dict)
    """Key -> another value. transformers' logits on the longest prompt must differ with it: the branch was taken."""
    num_parts: int = 1
    """Of the runner's layers for one of the config."""
    oracle: str = ""
    """The model type by which transformers computes the same, where it doesn't know this one."""
    of: str = ""
    """The model type, where the row is another form of it and its name no model type."""


QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "mlp_only_layers": [1],
}

MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
    "max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}  # fmt: skip

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SMALL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
WHOLE_TURNS = {FULL: {"rope_type": "default", "rope_theta": 1_000_000.0}, SLIDING: PLAIN_ROPE}
WHOLE_HEAD_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}

ROWS: dict[str, TinyModel] = {
    "mistral": TinyModel(branches={"sliding_window": 1000}),
    "qwen2": TinyModel(branches={"sliding_window": 1000}),
    "qwen3": TinyModel(branches={"sliding_window": 1000}),
    "gemma3_text": TinyModel(branches={"sliding_window": 1000}),
    "mixtral": TinyModel(
        {"num_local_experts": 6, "num_experts_per_tok": 2},
        branches={"sliding_window": 1000, "num_experts_per_tok": 3},
    ),
    "qwen2_moe": TinyModel(
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 28, "norm_topk_prob": False},
        branches={"sliding_window": 1000, "norm_topk_prob": True, "num_experts_per_tok": 3},
    ),
    "qwen3_moe": TinyModel(
        {**QWEN_EXPERTS, "norm_topk_prob": True},
        branches={"sliding_window": 1000, "norm_topk_prob": False, "num_experts_per_tok": 3},
    ),
    "glm4_moe": TinyModel(
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        branches={"topk_group": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "deepseek_v2": TinyModel(
        LATENT
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
        branches={"topk_method": "greedy", "first_k_dense_replace": 0, "rope_parameters": PLAIN_ROPE},
    ),
    "deepseek_v3": TinyModel(
        LATENT
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        branches={"topk_group": 4, "first_k_dense_replace": 0, "rope_parameters": PLAIN_ROPE},
    ),
    "kimi_k2": TinyModel(
        LATENT
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        branches={"num_experts_per_tok": 2, "rope_parameters": PLAIN_ROPE},
        oracle="deepseek_v3",
    ),
    "deepseek_v32": TinyModel(
        LATENT
        | INDEXER
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        branches={"index_topk": 100, "topk_group": 4},
    ),
    "glm_moe_dsa": TinyModel(
        LATENT
        | INDEXER
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "full"],
        },
        branches={"index_topk": 100, "indexer_types": ["full", "shared", "shared"]},
    ),
    "deepseek_v4": TinyModel(**DEEPSEEK_V4),
    "glm5_next_text": TinyModel(**GLM5_NEXT),
    "qwen3_next": TinyModel(DELTA | SHARED_EXPERT, branches={"num_experts_per_tok": 3}),
    "qwen3_5_text": TinyModel(DELTA),
    "qwen3_5_moe_text": TinyModel(DELTA | SHARED_EXPERT, branches={"num_experts_per_tok": 3}),
    "kimi_linear": TinyModel(
        LATENT
        | {
            "q_lora_rank": None,
            "max_position_embeddings": 128,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 4,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        branches={"topk_group": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    **{name: TinyModel(**row) for name, row in MAMBA_ROWS.items()},
    "minimax_m2": TinyModel(
        {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4},
        branches={"num_experts_per_tok": 2},
    ),
    "minimax_m3_vl_text": TinyModel(
        {
            "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "index_n_heads": 2,
            "index_head_dim": 10,
            "index_block_size": 3,
            "index_topk_blocks": 3,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 40,
            "shared_intermediate_size": 20,
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
            "rotary_dim": 4,
        },
        branches={
            "index_topk_blocks": 50,
            "index_local_blocks": 3,
            "swiglu_limit": 7.0,
            "num_experts_per_tok": 3,
        },
    ),
    "llama4_text": TinyModel(
        {
            "num_hidden_layers": 4,
            "layer_types": None,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 4,
            "attn_scale": 0.5,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        branches={
            "attention_chunk_size": 1000,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 1, 1, 1],
            "use_qk_norm": False,
            "num_experts_per_tok": 1,
        },
    ),
    "gpt_oss": TinyModel(
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
        branches={
            "sliding_window": 1000,
            "swiglu_limit": 7.0,
            "num_experts_per_tok": 3,
            "rope_parameters": {**PLAIN_ROPE, "rope_theta": 150_000.0},
        },
    ),
    "gemma2": TinyModel(
        {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        branches={"sliding_window": 1000, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma4_text": TinyModel(
        {
            "layer_types": [SLIDING, FULL, FULL],
            "global_head_dim": 16,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
        },
        branches={"sliding_window": 1000, "final_logit_softcapping": None, "rope_parameters": WHOLE_TURNS},
    ),
    "gemma4_text small": TinyModel(
        of="gemma4_text",
        changes={
            "num_hidden_layers": 4,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
        branches={"sliding_window": 1000, "rope_parameters": WHOLE_TURNS},
    ),
    "gemma4_text experts": TinyModel(
        of="gemma4_text",
        changes={
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
        branches={"sliding_window": 1000, "top_k_experts": 3, "rope_parameters": WHOLE_TURNS},
    ),
    "phi3": TinyModel({"head_dim": 8}, branches={"sliding_window": None}),
    "olmo3": TinyModel(
        {
            "rope_parameters": {
                FULL: {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8},
                SLIDING: SMALL_ROPE,
            }
        },
        branches={"sliding_window": 1000, "rope_parameters": {FULL: SMALL_ROPE, SLIDING: SMALL_ROPE}},
    ),
    "granite": TinyModel(
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "attention_bias": True,
        },
        branches={
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
    "cohere2": TinyModel({"logit_scale": 0.7}, branches={"sliding_window": 1000, "logit_scale": 1.0}),
    "exaone4": TinyModel(branches={"sliding_window": 1000}),
    "smollm3": TinyModel(
        {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
        branches={"sliding_window": 1000, "no_rope_layers": [1, 1, 1]},
    ),
    "seed_oss": TinyModel({"attention_out_bias": True, "mlp_bias": True}),
    "glm4": TinyModel(branches={"rope_parameters": WHOLE_HEAD_ROPE}),
    "ministral": TinyModel(branches={"sliding_window": 1000}),
    "ministral3": TinyModel(
        {"rope_parameters": MINISTRAL3_ROPE},
        branches={"sliding_window": None, "rope_parameters": {**MINISTRAL3_ROPE, "llama_4_scaling_beta": 0.0}},
    ),
    "nemotron": TinyModel({"attention_bias": True, "mlp_bias": True}, branches={"rope_parameters": WHOLE_HEAD_ROPE}),
    "hunyuan_v1_dense": TinyModel(
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}},
        branches={"rope_parameters": SMALL_ROPE},
    ),
}
"""By model type, or a name for another form of one; a type that isn't here has TINY alone."""

WRAPPERS = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "glm5_next": "glm5_next_text", "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Model types of multimodal models, which transformers has no causal class for -> the row of their language model."""


def tiny_model(model_type: str) -> TinyModel:
    return ROWS.get(model_type, TinyModel())
