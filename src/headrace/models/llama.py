"""Llama 2 to 3.x, Mistral and what shares their structure (Touvron et al. 2023; Jiang et al. 2023)."""

from __future__ import annotations

from headrace.layers.decoder import PRE_NORM_RULES, ROTARY_NAMES, Decoder, PreNormLayer
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.rope import max_position, rope_settings
from headrace.layers.weights import WeightMap

__all__ = ["LlamaModel"]


DEFAULTS = {"max_position_embeddings": 2048}
MISTRAL_DEFAULTS = {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8}
"""What transformers takes for keys that a config leaves out."""


class LlamaModel(Decoder):
    """Pre-norm decoder with grouped-query attention and a gated MLP."""

    model_types = ("llama", "mistral")

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(MISTRAL_DEFAULTS if config.model_type == "mistral" else DEFAULTS)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        eps = config.number("rms_norm_eps", 1e-6)
        is_tied = config.flag("tie_word_embeddings", False)
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        super().__init__(
            embedding=embedding,
            layers=[_layer(config, factory, f"layers.{i}") for i in range(config.integer("num_hidden_layers"))],
            norm=factory.norm("norm", hidden_size, eps=eps),
            head=factory.head("head", vocab_size, hidden_size, tied_to=embedding if is_tied else None),
            ropes={"all": factory.rotary(rope_settings(config), config.head_dim())},
            max_position=max_position(config),
        )
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        self._weights = factory.weight_map(PRE_NORM_RULES, ignored=ROTARY_NAMES, tied=tied)

    def weight_map(self) -> WeightMap:
        return self._weights


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> PreNormLayer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    has_bias = config.flag("attention_bias", False)
    return PreNormLayer(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        attention=factory.attention(
            f"{name}.attention",
            hidden_size=hidden_size,
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=config.num_kv_heads(),
            head_dim=config.head_dim(),
            rope="all",
            window=config.optional_integer("sliding_window") if config.model_type == "mistral" else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=factory.mlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_act", "silu"),
            bias=config.flag("mlp_bias", False),
        ),
    )
