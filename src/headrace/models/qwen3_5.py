"""Qwen3.5, dense (Qwen team 2026): three layers of Gated DeltaNet to one of gated attention; the text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.models._qwen_hybrid import QwenHybrid

__all__ = ["Qwen35Model"]


class Qwen35Model(QwenHybrid):
    """The text model, also of multimodal checkpoints; images are not read."""

    model_types = ("qwen3_5_text", "qwen3_5")
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
