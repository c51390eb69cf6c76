"""Qwen3.5 with experts (Qwen team 2026; also Qwen3.8): the hybrid of Qwen3-Next, projections stored one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.models._qwen_hybrid import DEFAULTS, QwenHybridMoe

__all__ = ["Qwen35MoeModel"]


class Qwen35MoeModel(QwenHybridMoe):
    """The text model, also of multimodal checkpoints; images are not read."""

    model_types = ("qwen3_5_moe_text", "qwen3_5_moe")
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
