"""Qwen3-Next (Qwen team 2025): three layers of Gated DeltaNet to one of gated attention, experts in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.models._qwen_hybrid import DEFAULTS, QwenHybridMoe

__all__ = ["Qwen3NextModel"]


class Qwen3NextModel(QwenHybridMoe):
    """Recurrent projections are stored by key head."""

    model_types = ("qwen3_next",)
    is_grouped: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
