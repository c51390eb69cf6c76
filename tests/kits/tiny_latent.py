"""Tiny configs of models with latent or compressed attention: what their rows in `tests.kits.tiny` are made of."""

from __future__ import annotations

from typing import Any

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
}
# With few heads many scores are zero, and which of equal ones are chosen is nobody's promise.
INDEXER: dict[str, Any] = {
    "index_topk": 6,
    "index_n_heads": 20,
    "index_head_dim": 10,
    "layer_types": None,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

COMPRESS_MAIN = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
COMPRESS_YARN = {**YARN, "rope_theta": 1000.0, "partial_rotary_factor": 0.25, "attention_factor": 1.0}

DEEPSEEK_V4: dict[str, Any] = {
    "changes": {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 20,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6},
        "rope_parameters": {"compress": COMPRESS_YARN, "main": COMPRESS_MAIN},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.5,
        "o_groups": 4,
        "o_lora_rank": 6,
        "index_n_heads": 8,
        "index_head_dim": 12,
        "index_topk": 3,
        "hc_mult": 3,
    },
    "branches": {
        "sliding_window": 1000,
        "index_topk": 100,
        "swiglu_limit": 7.0,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "rope_parameters": {"compress": COMPRESS_MAIN, "main": COMPRESS_MAIN},
    },
}

GLM5_NEXT: dict[str, Any] = {
    "changes": LATENT
    | {
        "num_hidden_layers": 5,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "layer_types": [
            "linear_attention",
            "indexed_attention",
            "indexed_attention",
            "linear_attention",
            "indexed_attention",
        ],
        "indexer_types": ["full", "full", "shared", "full", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense"],
        "linear_num_heads": 4,
        "linear_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "index_kpool": 3,
        "index_topk": 6,
        "index_n_heads": 8,
        "index_head_dim": 10,
        "swiglu_limit": 0.5,
        "hc_mult": 3,
    },
    "branches": {
        "index_topk": 99,
        "indexer_types": ["full", "full", "full", "full", "full"],
        "topk_group": 4,
        "swiglu_limit": 7.0,
        "linear_lower_bound": None,
        "routed_scaling_factor": 1.0,
    },
}
