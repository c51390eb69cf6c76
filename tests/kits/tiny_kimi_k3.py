"""A tiny Kimi-K3 in the published form: keys, names, the prefix of a multimodal checkpoint, zeros behind A_log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.kits.tiny import VOCAB_SIZE
from tests.models.kimi_k3_reference import KimiK3Reference, random_weights

DELTA: dict[str, Any] = {
    "num_heads": 4, "head_dim": 6, "short_conv_kernel_size": 3, "full_attn_layers": [2, 5], "kda_layers": [1, 3, 4],
    "gate_lower_bound": -5.0, "use_full_rank_gate": True,
}  # fmt: skip
KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 44,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0,
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "mla_use_nope": True, "mla_use_output_gate": True, "num_experts": 8, "num_experts_per_token": 3,
    "num_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "routed_expert_hidden_size": 24,
    "latent_moe_use_norm": True, "moe_renormalize": True, "routed_scaling_factor": 1.3, "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2,
    "attn_res_block_size": 2, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "linear_attn_config": DELTA,
}  # fmt: skip
"""Two stretches and the beginning of a third; groups of experts, though the published model has one."""
SEED = 1
"""Others may have a token whose norms take a vector near zero, which spreads what float32 rounds."""


def as_stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the released checkpoint has them."""
    stored = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    for name, tensor in stored.items():
        if name.endswith("A_log"):
            stored[name] = torch.cat((tensor, torch.zeros(DELTA["head_dim"] - len(tensor))))
    stored["vision_tower.patch_embed.proj.weight"] = torch.ones(2)
    stored["mm_projector.proj.0.weight"] = torch.ones(2)
    return stored


def save_kimi_k3(folder: Path, **changes: Any) -> KimiK3Reference:
    """Write a random float32 checkpoint, as the language model of a multimodal one; returns the reference of it."""
    config = {**KIMI_K3, **changes}
    weights = random_weights(config, seed=SEED)
    save_file(as_stored(weights), folder / "model.safetensors")
    whole = {"model_type": "kimi_k3", "text_config": config, "vision_config": {}, "media_placeholder_token_id": 3}
    (folder / "config.json").write_text(json.dumps(whole))
    return KimiK3Reference(config, weights)
