"""Mistral Small 3.1 and later, and Ministral 3 (Mistral AI 2025): the language model of multimodal checkpoints."""

from __future__ import annotations

from headrace.layers.causal import TEXT_PREFIXES, TextOf, text_section
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.models.llama import LlamaModel
from headrace.models.ministral3 import Ministral3Model

__all__ = ["Mistral3Model"]

DEFAULTS = {
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000_000.0,
    "sliding_window": None,
    "vocab_size": 131_072,
}
"""What transformers takes for a `text_config` that isn't there."""

VISION_NAMES = (
    "vision_tower.**",
    "multi_modal_projector.**",
    "model.vision_tower.**",
    "model.multi_modal_projector.**",
)


class Mistral3Model(TextOf):
    """Images are not read."""

    model_types = ("mistral3",)
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        text = text_section(config if "text_config" in config else config.with_defaults({"text_config": DEFAULTS}))
        text = text.with_defaults({"model_type": "mistral"})
        kinds = {"mistral": LlamaModel, "ministral3": Ministral3Model}
        if text.model_type not in kinds:
            raise ValueError(
                f"{text.place}: the language model {text.model_type!r} is not served: {', '.join(kinds)} are"
            )
        make = kinds[text.model_type]
        super().__init__(lambda: make(text, factory), factory, renamed=TEXT_PREFIXES, ignored=VISION_NAMES)
