"""Qwen3.5, dense (Qwen team 2026): three layers of Gated DeltaNet to one of gated attention; the text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.models._qwen_hybrid import DEFAULTS, QwenHybrid

__all__ = ["Qwen35Model"]


class Qwen35Model(QwenHybrid):
    """The text model, also of multimodal checkpoints; images are not read."""

    model_types = ("qwen3_5_text", "qwen3_5")
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "num_key_value_heads": 4,
    }
