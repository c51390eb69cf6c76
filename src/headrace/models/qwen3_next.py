"""Qwen3-Next (Qwen team 2025): three layers of Gated DeltaNet to one of gated attention, experts in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.models._qwen_hybrid import QwenHybridMoe

__all__ = ["Qwen3NextModel"]


class Qwen3NextModel(QwenHybridMoe):
    """Recurrent projections are stored by key head."""

    model_types = ("qwen3_next",)
    is_grouped: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
