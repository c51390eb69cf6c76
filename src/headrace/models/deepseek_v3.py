"""DeepSeek-V3 (DeepSeek-AI 2024; also R1 and Kimi-K2): latent attention, experts by corrected sigmoid scores."""

from __future__ import annotations

from headrace.models._deepseek import LatentDecoder

__all__ = ["DeepseekV3Model"]


class DeepseekV3Model(LatentDecoder):
    """What the others are told apart from."""

    model_types = ("deepseek_v3", "kimi_k2")
