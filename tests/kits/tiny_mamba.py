"""Rows of `tests.kits.tiny`: models with Mamba-2 layers."""

from __future__ import annotations

from typing import Any

FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 5,
    "mamba_d_conv": 3, "attention_in_multiplier": 1.7, "attention_out_multiplier": 0.6, "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.5, 1.6, 0.7, 1.3, 0.8],
    "mlp_multipliers": [1.8, 0.6], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
FALCON_H1_BRANCHES: dict[str, Any] = {
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "key_multiplier": 1.0, "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0],
    "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "time_step_limit": [0.0, 0.7],
}  # fmt: skip

MAMBA_ROWS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "changes": {"hidden_size": 24, "num_heads": 8, "head_dim": 6, "state_size": 5, "n_groups": 2, "conv_kernel": 3},
        "branches": {"time_step_limit": [0.0, 0.7]},
    },
    "nemotron_h": {
        "changes": {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "ssm_state_size": 5,
            "n_groups": 2,
            "conv_kernel": 3,
        },
        "branches": {"topk_group": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    },
    "granitemoehybrid": {
        "changes": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 20,
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
        },
        "branches": {
            "num_experts_per_tok": 2,
            "position_embedding_type": None,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    },
    "falcon_h1": {"changes": FALCON_H1, "branches": FALCON_H1_BRANCHES, "num_parts": 2},
    "falcon_h1 norm": {
        "changes": {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_n_groups": 1,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
        },
        "branches": {"mamba_norm_before_gate": True, "key_multiplier": 1.0, "attention_in_multiplier": 1.0},
        "num_parts": 2,
        "of": "falcon_h1",
    },
    "falcon_h1 norm first": {
        "changes": {**FALCON_H1, "mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_d_head": 8},
        "branches": {"mamba_norm_before_gate": False, "mamba_rms_norm": False},
        "num_parts": 2,
        "of": "falcon_h1",
    },
}
"""What `TinyModel` takes."""
